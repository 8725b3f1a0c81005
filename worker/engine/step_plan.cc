#include "worker/engine/step_plan.h"

#include <bit>
#include <cmath>
#include <cstring>
#include <limits>
#include <type_traits>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::uint32_t kMagic = 0x54464557;  // "WEFT"

// Layout: the header, then previous_tokens, sampling_deltas, table_deltas, delta_blocks, sequences,
// token_ids, kv_ops and the targets of these, each packed without padding.
constexpr std::size_t kHeaderBytes = 4 + 4 + 8 + 8 * 4;
constexpr std::size_t kTokenBytes = 4;
constexpr std::size_t kSamplingDeltaBytes = 4 + 4 + 4 + 4 + 4 + 8 + 4;
constexpr std::size_t kTableDeltaBytes = 3 * 4;
constexpr std::size_t kSequenceBytes = 4 + 4 + 8 + 4 + 4;
constexpr std::size_t kKvOpBytes = 4 + 4 + 4 + 8 + 8 + 8 + 4;
// A transfer that ends while another begins, for every slot, and what was cancelled meanwhile.
constexpr std::int64_t kMaxKvOpsPerSlot = 8;

template <typename T>
using Bits = std::conditional_t<sizeof(T) == 8, std::uint64_t, std::uint32_t>;

// Appends to memory that the caller has sized.
class Writer {
 public:
  explicit Writer(std::byte* to) : to_(to) {}

  template <typename T>
  void Put(T value) {
    const auto bits = std::bit_cast<Bits<T>>(value);
    for (std::size_t i = 0; i < sizeof(T); ++i) to_[i] = static_cast<std::byte>(bits >> (8 * i));
    to_ += sizeof(T);
  }
  void PutBytes(const std::string& bytes) {
    std::memcpy(to_, bytes.data(), bytes.size());
    to_ += bytes.size();
  }
  const std::byte* end() const { return to_; }

 private:
  std::byte* to_;
};

// Reads what the caller has checked to be there.
class Reader {
 public:
  explicit Reader(const std::byte* from) : from_(from) {}

  template <typename T>
  T Get() {
    Bits<T> bits = 0;
    for (std::size_t i = 0; i < sizeof(T); ++i) {
      bits |= static_cast<Bits<T>>(std::to_integer<std::uint8_t>(from_[i])) << (8 * i);
    }
    from_ += sizeof(T);
    return std::bit_cast<T>(bits);
  }
  std::string GetBytes(std::size_t count) {
    std::string bytes(reinterpret_cast<const char*>(from_), count);
    from_ += count;
    return bytes;
  }

 private:
  const std::byte* from_;
};

absl::Status Refused(std::string_view field, std::int64_t seen, std::int64_t min,
                     std::int64_t max) {
  return absl::InvalidArgumentError(
      fmt::format("step message: {} is {}; allowed is {} to {}", field, seen, min, max));
}

absl::Status CheckRange(std::string_view field, std::int64_t seen, std::int64_t min,
                        std::int64_t max) {
  if (seen < min || seen > max) return Refused(field, seen, min, max);
  return absl::OkStatus();
}

struct Header {
  std::uint64_t step = 0;
  std::uint32_t num_previous_tokens = 0;
  std::uint32_t num_sampling_deltas = 0;
  std::uint32_t num_table_deltas = 0;
  std::uint32_t num_delta_blocks = 0;
  std::uint32_t num_sequences = 0;
  std::uint32_t num_tokens = 0;
  std::uint32_t num_kv_ops = 0;
  std::uint32_t kv_target_bytes = 0;  // of all kv_ops together

  std::uint64_t MessageBytes() const {
    return kHeaderBytes + kTokenBytes * std::uint64_t{num_previous_tokens} +
           kSamplingDeltaBytes * std::uint64_t{num_sampling_deltas} +
           kTableDeltaBytes * std::uint64_t{num_table_deltas} +
           kTokenBytes * std::uint64_t{num_delta_blocks} +
           kSequenceBytes * std::uint64_t{num_sequences} + kTokenBytes * std::uint64_t{num_tokens} +
           kKvOpBytes * std::uint64_t{num_kv_ops} + kv_target_bytes;
  }
};

absl::Status ReadHeader(absl::Span<const std::byte> message, const PlanLimits& limits,
                        Header& header) {
  if (message.size() < kHeaderBytes) {
    return absl::InvalidArgumentError(fmt::format("step message: {} bytes; the header alone has {}",
                                                  message.size(), kHeaderBytes));
  }
  Reader reader(message.data());
  if (const auto magic = reader.Get<std::uint32_t>(); magic != kMagic) {
    return absl::InvalidArgumentError(
        fmt::format("step message: magic is {:#x}; expected {:#x}", magic, kMagic));
  }
  if (const auto version = reader.Get<std::uint32_t>(); version != kPlanVersion) {
    return absl::InvalidArgumentError(
        fmt::format("step message: version is {}; this build speaks {}", version, kPlanVersion));
  }
  header.step = reader.Get<std::uint64_t>();
  header.num_previous_tokens = reader.Get<std::uint32_t>();
  header.num_sampling_deltas = reader.Get<std::uint32_t>();
  header.num_table_deltas = reader.Get<std::uint32_t>();
  header.num_delta_blocks = reader.Get<std::uint32_t>();
  header.num_sequences = reader.Get<std::uint32_t>();
  header.num_tokens = reader.Get<std::uint32_t>();
  header.num_kv_ops = reader.Get<std::uint32_t>();
  header.kv_target_bytes = reader.Get<std::uint32_t>();
  if (header.step == 0)
    return absl::InvalidArgumentError("step message: step is 0; the first is 1");
  const std::int64_t max_seqs = limits.max_num_seqs;
  const std::int64_t max_rows = limits.max_num_batched_tokens;
  RETURN_IF_ERROR(CheckRange("number of previous tokens", header.num_previous_tokens, 0, max_rows));
  RETURN_IF_ERROR(CheckRange("number of sampling deltas", header.num_sampling_deltas, 0, max_seqs));
  RETURN_IF_ERROR(CheckRange("number of table deltas", header.num_table_deltas, 0, max_seqs));
  RETURN_IF_ERROR(CheckRange("number of delta blocks", header.num_delta_blocks, 0,
                             max_seqs * limits.max_blocks_per_seq));
  RETURN_IF_ERROR(CheckRange("number of sequences", header.num_sequences, 0, max_seqs));
  RETURN_IF_ERROR(CheckRange("number of rows", header.num_tokens, 0, max_rows));
  RETURN_IF_ERROR(
      CheckRange("number of KV operations", header.num_kv_ops, 0, kMaxKvOpsPerSlot * max_seqs));
  if (message.size() != header.MessageBytes()) {
    return absl::InvalidArgumentError(fmt::format("step message: {} bytes; its counts say {}",
                                                  message.size(), header.MessageBytes()));
  }
  return absl::OkStatus();
}

absl::Status ReadPreviousTokens(Reader& reader, const Header& header, const PlanLimits& limits,
                                std::vector<std::int32_t>& previous_tokens) {
  for (std::uint32_t i = 0; i < header.num_previous_tokens; ++i) {
    const auto token = reader.Get<std::int32_t>();
    RETURN_IF_ERROR(CheckRange("previous token", token, kNoTokenLeft, limits.vocab_size - 1));
    previous_tokens.push_back(token);
  }
  return absl::OkStatus();
}

absl::Status ReadSamplingDeltas(Reader& reader, const Header& header, const PlanLimits& limits,
                                StepPlan& plan) {
  for (std::uint32_t i = 0; i < header.num_sampling_deltas; ++i) {
    SamplingDelta delta;
    delta.slot = reader.Get<std::int32_t>();
    delta.params.temperature = reader.Get<float>();
    delta.params.top_p = reader.Get<float>();
    delta.params.top_k = reader.Get<std::int32_t>();
    delta.params.min_p = reader.Get<float>();
    delta.params.seed = reader.Get<std::uint64_t>();
    const auto whole_row = reader.Get<std::int32_t>();
    RETURN_IF_ERROR(CheckRange("whole_row of a sampling delta", whole_row, 0, 1));
    delta.params.whole_row = whole_row == 1;
    RETURN_IF_ERROR(CheckRange("slot of a sampling delta", delta.slot, 0, limits.max_num_seqs - 1));
    RETURN_IF_ERROR(ValidateSampling(delta.params));
    plan.sampling_deltas.push_back(delta);
  }
  return absl::OkStatus();
}

absl::Status ReadTableDeltas(Reader& reader, const Header& header, const PlanLimits& limits,
                             StepPlan& plan) {
  std::int64_t num_blocks = 0;
  for (std::uint32_t i = 0; i < header.num_table_deltas; ++i) {
    BlockTableDelta delta;
    delta.slot = reader.Get<std::int32_t>();
    delta.first_index = reader.Get<std::int32_t>();
    delta.num_blocks = reader.Get<std::int32_t>();
    RETURN_IF_ERROR(CheckRange("slot of a table delta", delta.slot, 0, limits.max_num_seqs - 1));
    RETURN_IF_ERROR(CheckRange("first index of a table delta", delta.first_index, 0,
                               limits.max_blocks_per_seq - 1));
    RETURN_IF_ERROR(CheckRange("blocks of a table delta", delta.num_blocks, 1,
                               limits.max_blocks_per_seq - delta.first_index));
    num_blocks += delta.num_blocks;
    plan.table_deltas.push_back(delta);
  }
  if (num_blocks != header.num_delta_blocks) {
    return absl::InvalidArgumentError(
        fmt::format("step message: number of delta blocks is {}; the table deltas have {}",
                    header.num_delta_blocks, num_blocks));
  }
  for (std::uint32_t i = 0; i < header.num_delta_blocks; ++i) {
    const auto block = reader.Get<std::int32_t>();
    RETURN_IF_ERROR(CheckRange("block", block, 0, limits.num_blocks - 1));
    plan.delta_blocks.push_back(block);
  }
  return absl::OkStatus();
}

absl::Status ReadSequences(Reader& reader, const Header& header, const PlanLimits& limits,
                           StepPlan& plan) {
  std::int64_t num_rows = 0;
  for (std::uint32_t i = 0; i < header.num_sequences; ++i) {
    PlanSequence sequence;
    sequence.slot = reader.Get<std::int32_t>();
    sequence.num_rows = reader.Get<std::int32_t>();
    sequence.first_position = reader.Get<std::int64_t>();
    sequence.num_sampled = reader.Get<std::int32_t>();
    sequence.num_scored = reader.Get<std::int32_t>();
    RETURN_IF_ERROR(CheckRange("slot of a sequence", sequence.slot, 0, limits.max_num_seqs - 1));
    RETURN_IF_ERROR(CheckRange("rows of a sequence", sequence.num_rows, 1,
                               std::int64_t{header.num_tokens} - num_rows));
    RETURN_IF_ERROR(CheckRange("first position of a sequence", sequence.first_position, 0,
                               limits.max_model_len - sequence.num_rows));
    RETURN_IF_ERROR(
        CheckRange("sampled rows of a sequence", sequence.num_sampled, 0, sequence.num_rows));
    RETURN_IF_ERROR(CheckRange("scored rows of a sequence", sequence.num_scored, 0,
                               sequence.num_rows - sequence.num_sampled));
    num_rows += sequence.num_rows;
    plan.sequences.push_back(sequence);
  }
  RETURN_IF_ERROR(
      CheckRange("number of rows with logits", plan.num_logits_rows(), 0, limits.max_num_seqs));
  if (num_rows != header.num_tokens) {
    return absl::InvalidArgumentError(fmt::format(
        "step message: number of rows is {}; the sequences have {}", header.num_tokens, num_rows));
  }
  for (std::uint32_t i = 0; i < header.num_tokens; ++i) {
    const auto token = reader.Get<std::int32_t>();
    if (token >= 0) {
      RETURN_IF_ERROR(CheckRange("token", token, 0, limits.vocab_size - 1));
    } else {
      RETURN_IF_ERROR(CheckRange("reference to a previous token", ~token, 0,
                                 std::int64_t{header.num_previous_tokens} - 1));
    }
    plan.token_ids.push_back(token);
  }
  return absl::OkStatus();
}

absl::Status ReadKvOps(Reader& reader, const Header& header, const PlanLimits& limits,
                       StepPlan& plan) {
  std::vector<std::uint32_t> target_bytes;
  std::uint64_t all_bytes = 0;
  for (std::uint32_t i = 0; i < header.num_kv_ops; ++i) {
    KvOp op;
    const auto kind = reader.Get<std::uint32_t>();
    RETURN_IF_ERROR(CheckRange("kind of a KV operation", kind, 0,
                               static_cast<std::int64_t>(KvOp::Kind::kClose)));
    op.kind = static_cast<KvOp::Kind>(kind);
    const auto last = reader.Get<std::uint32_t>();
    RETURN_IF_ERROR(CheckRange("last of a KV operation", last, 0, 1));
    op.last = last == 1;
    op.slot = reader.Get<std::int32_t>();
    op.transfer = reader.Get<std::uint64_t>();
    op.first_position = reader.Get<std::int64_t>();
    op.end_position = reader.Get<std::int64_t>();
    RETURN_IF_ERROR(CheckRange("slot of a KV operation", op.slot, 0, limits.max_num_seqs - 1));
    RETURN_IF_ERROR(
        CheckRange("end position of a KV operation", op.end_position, 0, limits.max_model_len));
    RETURN_IF_ERROR(
        CheckRange("first position of a KV operation", op.first_position, 0, op.end_position));
    target_bytes.push_back(reader.Get<std::uint32_t>());
    RETURN_IF_ERROR(CheckRange("bytes of a KV target", target_bytes.back(), 0, kMaxKvTargetBytes));
    all_bytes += target_bytes.back();
    plan.kv_ops.push_back(std::move(op));
  }
  if (all_bytes != header.kv_target_bytes) {
    return absl::InvalidArgumentError(
        fmt::format("step message: the KV targets have {} bytes; its counts say {}", all_bytes,
                    header.kv_target_bytes));
  }
  for (std::uint32_t i = 0; i < header.num_kv_ops; ++i) {
    if (target_bytes[i] == 0) continue;
    plan.kv_ops[i].target = std::make_shared<const std::string>(reader.GetBytes(target_bytes[i]));
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status ValidateSampling(const SamplingParams& params) {
  // Written so that NaN is refused.
  if (!(params.temperature >= 0 && params.temperature <= std::numeric_limits<float>::max())) {
    return absl::InvalidArgumentError(
        fmt::format("temperature is {}; allowed is 0 (greedy) and any finite number above",
                    params.temperature));
  }
  if (!(params.top_p > 0 && params.top_p <= 1)) {
    return absl::InvalidArgumentError(
        fmt::format("top_p is {}; allowed is above 0 and at most 1", params.top_p));
  }
  if (params.top_k < 0) {
    return absl::InvalidArgumentError(
        fmt::format("top_k is {}; allowed is 0 (off) and above", params.top_k));
  }
  if (!(params.min_p >= 0 && params.min_p <= 1)) {
    return absl::InvalidArgumentError(fmt::format("min_p is {}; allowed is 0 to 1", params.min_p));
  }
  return absl::OkStatus();
}

std::int32_t StepPlan::num_logits_rows() const {
  std::int32_t total = 0;
  for (const PlanSequence& sequence : sequences) {
    total += sequence.num_scored + sequence.num_sampled;
  }
  return total;
}

std::int32_t StepPlan::num_sampled_rows() const {
  std::int32_t total = 0;
  for (const PlanSequence& sequence : sequences) total += sequence.num_sampled;
  return total;
}

void StepPlan::Clear() {
  step = 0;
  sampling_deltas.clear();
  logits_deltas.clear();
  table_deltas.clear();
  delta_blocks.clear();
  sequences.clear();
  token_ids.clear();
  kv_ops.clear();
}

namespace {

void WriteKvOps(const std::vector<KvOp>& ops, Writer& writer) {
  for (const KvOp& op : ops) {
    writer.Put(static_cast<std::uint32_t>(op.kind));
    writer.Put(std::uint32_t{op.last});
    writer.Put(op.slot);
    writer.Put(op.transfer);
    writer.Put(op.first_position);
    writer.Put(op.end_position);
    writer.Put(static_cast<std::uint32_t>(op.target == nullptr ? 0 : op.target->size()));
  }
  for (const KvOp& op : ops) {
    if (op.target != nullptr) writer.PutBytes(*op.target);
  }
}

}  // namespace

void EncodeStep(absl::Span<const std::int32_t> previous_tokens, const StepPlan& plan,
                std::vector<std::byte>& out) {
  std::size_t target_bytes = 0;
  for (const KvOp& op : plan.kv_ops) target_bytes += op.target == nullptr ? 0 : op.target->size();
  const Header header = {
      .step = plan.step,
      .num_previous_tokens = static_cast<std::uint32_t>(previous_tokens.size()),
      .num_sampling_deltas = static_cast<std::uint32_t>(plan.sampling_deltas.size()),
      .num_table_deltas = static_cast<std::uint32_t>(plan.table_deltas.size()),
      .num_delta_blocks = static_cast<std::uint32_t>(plan.delta_blocks.size()),
      .num_sequences = static_cast<std::uint32_t>(plan.sequences.size()),
      .num_tokens = static_cast<std::uint32_t>(plan.token_ids.size()),
      .num_kv_ops = static_cast<std::uint32_t>(plan.kv_ops.size()),
      .kv_target_bytes = static_cast<std::uint32_t>(target_bytes),
  };
  out.resize(header.MessageBytes());
  Writer writer(out.data());
  writer.Put(kMagic);
  writer.Put(kPlanVersion);
  writer.Put(header.step);
  writer.Put(header.num_previous_tokens);
  writer.Put(header.num_sampling_deltas);
  writer.Put(header.num_table_deltas);
  writer.Put(header.num_delta_blocks);
  writer.Put(header.num_sequences);
  writer.Put(header.num_tokens);
  writer.Put(header.num_kv_ops);
  writer.Put(header.kv_target_bytes);
  for (std::int32_t token : previous_tokens) writer.Put(token);
  for (const SamplingDelta& delta : plan.sampling_deltas) {
    writer.Put(delta.slot);
    writer.Put(delta.params.temperature);
    writer.Put(delta.params.top_p);
    writer.Put(delta.params.top_k);
    writer.Put(delta.params.min_p);
    writer.Put(delta.params.seed);
    writer.Put(std::int32_t{delta.params.whole_row});
  }
  for (const BlockTableDelta& delta : plan.table_deltas) {
    writer.Put(delta.slot);
    writer.Put(delta.first_index);
    writer.Put(delta.num_blocks);
  }
  for (std::int32_t block : plan.delta_blocks) writer.Put(block);
  for (const PlanSequence& sequence : plan.sequences) {
    writer.Put(sequence.slot);
    writer.Put(sequence.num_rows);
    writer.Put(sequence.first_position);
    writer.Put(sequence.num_sampled);
    writer.Put(sequence.num_scored);
  }
  for (std::int32_t token : plan.token_ids) writer.Put(token);
  WriteKvOps(plan.kv_ops, writer);
  CHECK(writer.end() == out.data() + out.size());
}

absl::Status DecodeStep(absl::Span<const std::byte> message, const PlanLimits& limits,
                        std::vector<std::int32_t>& previous_tokens, StepPlan& plan) {
  previous_tokens.clear();
  plan.Clear();
  Header header;
  RETURN_IF_ERROR(ReadHeader(message, limits, header));
  plan.step = header.step;
  Reader reader(message.data() + kHeaderBytes);
  RETURN_IF_ERROR(ReadPreviousTokens(reader, header, limits, previous_tokens));
  RETURN_IF_ERROR(ReadSamplingDeltas(reader, header, limits, plan));
  RETURN_IF_ERROR(ReadTableDeltas(reader, header, limits, plan));
  RETURN_IF_ERROR(ReadSequences(reader, header, limits, plan));
  return ReadKvOps(reader, header, limits, plan);
}

}  // namespace weft
