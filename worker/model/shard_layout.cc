#include "worker/model/shard_layout.h"

#include <cstdlib>
#include <string>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

constexpr std::int32_t kDefaultInterleave = 16;  // and the most that a default chooses
// Far above any useful block, and low enough that no product of sizes leaves 32 bits.
constexpr std::int32_t kMaxBlockSize = 1 << 20;

absl::Status CheckSize(std::string_view flag, std::int32_t value) {
  if (value >= 1) return absl::OkStatus();
  return absl::InvalidArgumentError(fmt::format("{} is {}; it must be at least 1", flag, value));
}

std::string Divisors(std::int32_t of) {
  std::string list;
  for (std::int32_t d = 1; d <= of; ++d) {
    if (of % d == 0) list += fmt::format("{}{}", list.empty() ? "" : ", ", d);
  }
  return list;
}

std::int32_t LargestDivisorUpTo(std::int32_t of, std::int32_t limit) {
  std::int32_t d = std::min(of, limit);
  while (of % d != 0) --d;
  return d;
}

std::int32_t NearestDivisor(std::int32_t of, std::int32_t to) {
  const std::int32_t below = LargestDivisorUpTo(of, to);
  std::int32_t above = std::min(to, of);
  while (of % above != 0) ++above;
  return to - below <= std::abs(above - to) ? below : above;
}

// Why `block_size` is no multiple of `step` = N * I, and what is near it and works.
absl::Status BadBlockSize(std::int32_t block_size, std::int32_t dcp,
                          std::optional<std::int32_t> interleave, std::int64_t step) {
  const std::int64_t below = block_size / step * step;
  const std::int64_t above = below + step;
  std::string nearest;
  if (below > 0) nearest += fmt::format("{}", below);
  if (above <= kMaxBlockSize) nearest += fmt::format("{}{}", below > 0 ? " or " : "", above);
  std::string message =
      fmt::format("--block-size {} (tokens over the DCP group) is no multiple of ", block_size);
  message +=
      interleave.has_value()
          ? fmt::format("{} = --decode-context-parallel-size {} x --cp-kv-cache-interleave-size {}",
                        step, dcp, *interleave)
          : fmt::format("--decode-context-parallel-size {}", dcp);
  if (!nearest.empty()) message += fmt::format("; nearest block sizes that work: {}", nearest);
  if (interleave.has_value() && block_size % dcp == 0) {
    message += fmt::format("; with block size {} the nearest interleave that works is {}",
                           block_size, NearestDivisor(block_size / dcp, *interleave));
  }
  return absl::InvalidArgumentError(message);
}

struct BlockShape {
  std::int32_t block_size;
  std::int32_t interleave;
};

// The block rule: V % (N * I) == 0, and its defaults.
absl::StatusOr<BlockShape> ResolveBlockShape(const LayoutOptions& options) {
  const std::int32_t dcp = options.decode_context_parallel_size;
  if (options.block_size) RETURN_IF_ERROR(CheckSize("--block-size", *options.block_size));
  if (options.interleave) {
    RETURN_IF_ERROR(CheckSize("--cp-kv-cache-interleave-size", *options.interleave));
  }
  if (options.block_size.value_or(1) > kMaxBlockSize) {
    return absl::InvalidArgumentError(fmt::format("--block-size is {}; it must be at most {}",
                                                  *options.block_size, kMaxBlockSize));
  }
  // One rank owns every position whatever I is.
  const std::optional<std::int32_t> interleave = dcp == 1 ? std::nullopt : options.interleave;

  std::int64_t block_size = 0;
  if (options.block_size) {
    block_size = *options.block_size;
    const std::int64_t step = std::int64_t{dcp} * interleave.value_or(1);
    if (block_size % step != 0) {
      return BadBlockSize(*options.block_size, dcp, interleave, step);
    }
  } else {
    const std::int64_t step = std::int64_t{dcp} * interleave.value_or(kDefaultInterleave);
    block_size = (options.min_block_size + step - 1) / step * step;
    if (block_size > kMaxBlockSize) {
      return absl::InvalidArgumentError(
          fmt::format("--decode-context-parallel-size {} x --cp-kv-cache-interleave-size {} needs "
                      "a block of {} tokens; the largest block is {}",
                      dcp, interleave.value_or(kDefaultInterleave), block_size, kMaxBlockSize));
    }
  }
  const auto block_tokens_per_rank = static_cast<std::int32_t>(block_size / dcp);
  return BlockShape{.block_size = static_cast<std::int32_t>(block_size),
                    .interleave = interleave.value_or(
                        LargestDivisorUpTo(block_tokens_per_rank, kDefaultInterleave))};
}

absl::Status CheckParallelSizes(const LayoutOptions& options, const HeadCounts& heads,
                                std::int32_t rank) {
  const std::int32_t tp = options.tensor_parallel_size;
  const std::int32_t dcp = options.decode_context_parallel_size;
  RETURN_IF_ERROR(CheckSize("--tensor-parallel-size", tp));
  RETURN_IF_ERROR(CheckSize("--decode-context-parallel-size", dcp));
  RETURN_IF_ERROR(CheckSize("the least default block size", options.min_block_size));
  RETURN_IF_ERROR(CheckSize("num_attention_heads", heads.num_q_heads));
  RETURN_IF_ERROR(CheckSize("num_key_value_heads", heads.num_kv_heads));
  if (heads.num_q_heads % heads.num_kv_heads != 0) {
    return absl::InvalidArgumentError(
        fmt::format("num_key_value_heads is {}; it must divide num_attention_heads, {}",
                    heads.num_kv_heads, heads.num_q_heads));
  }
  if (tp > heads.num_q_heads) {
    return absl::InvalidArgumentError(
        fmt::format("--tensor-parallel-size is {}; it must be at most {}, the model's query heads",
                    tp, heads.num_q_heads));
  }
  if (tp % dcp != 0) {
    return absl::InvalidArgumentError(
        fmt::format("--decode-context-parallel-size is {}; it must divide --tensor-parallel-size "
                    "{}: one of {}",
                    dcp, tp, Divisors(tp)));
  }
  if (rank < 0 || rank >= tp) {
    return absl::InvalidArgumentError(fmt::format(
        "rank is {}; it must be in [0, {}), as --tensor-parallel-size is {}", rank, tp, tp));
  }
  return absl::OkStatus();
}

}  // namespace

absl::StatusOr<ShardLayout> ShardLayout::Create(const LayoutOptions& options,
                                                const HeadCounts& heads, std::int32_t rank) {
  RETURN_IF_ERROR(CheckParallelSizes(options, heads, rank));
  ASSIGN_OR_RETURN(const BlockShape shape, ResolveBlockShape(options));
  ShardLayout layout;
  layout.tp_ = options.tensor_parallel_size;
  layout.dcp_ = options.decode_context_parallel_size;
  layout.rank_ = rank;
  layout.block_size_ = shape.block_size;
  layout.interleave_ = shape.interleave;
  layout.num_q_heads_ = heads.num_q_heads;
  layout.num_kv_heads_ = heads.num_kv_heads;
  layout.replicate_query_ = options.replicate_query;
  return layout;
}

IndexRange ShardLayout::GroupQHeads() const {
  const std::int32_t first = dcp_group() * dcp_;
  return {QHeads(first).begin, QHeads(first + dcp_ - 1).end};
}

IndexRange ShardLayout::GroupKvHeads() const {
  const IndexRange q = GroupQHeads();
  return {q.begin / q_per_kv(), (q.end + q_per_kv() - 1) / q_per_kv()};
}

double ShardLayout::KvCopies() const {
  ShardLayout other = *this;
  std::int64_t stored = 0;
  for (other.rank_ = 0; other.rank_ < tp_; other.rank_ += dcp_) {
    stored += other.GroupKvHeads().size();
  }
  return static_cast<double>(stored) / num_kv_heads_;
}

}  // namespace weft
