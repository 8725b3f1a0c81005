// The whole of attention under DCP: queries gathered, every rank attends to its own positions
// (real kernel and paged cache), partial outputs exchanged and merged; against one long softmax.

#include "worker/model/dcp_attention.h"

#include <cmath>
#include <random>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/attention.h"
#include "tests/worker/group/rank_processes.h"

namespace weft {
namespace {

using ::testing::Each;
using ::testing::IsEmpty;

constexpr int kHeadDim = 16;

struct Shape {
  int tp;  // T; all of its DCP groups are one (N = T) unless dcp says otherwise
  int dcp;
  int num_q_heads;
  int num_kv_heads;
  int interleave;
  int block_size;
  DcpExchange exchange;
  bool replicate_query;

  std::string Name() const {
    return fmt::format("T={} N={} heads {}/{} I={} V={} {}{}", tp, dcp, num_q_heads, num_kv_heads,
                       interleave, block_size, DcpExchangeName(exchange),
                       replicate_query ? ", queries replicated" : "");
  }
  ShardLayout Layout(int rank) const {
    return *ShardLayout::Create({.tensor_parallel_size = tp,
                                 .decode_context_parallel_size = dcp,
                                 .block_size = block_size,
                                 .interleave = interleave,
                                 .replicate_query = replicate_query},
                                {.num_q_heads = num_q_heads, .num_kv_heads = num_kv_heads}, rank);
  }
};

// One sequence: every row is a query at its own position.
struct Problem {
  int num_tokens;
  std::vector<int> row_position;
  std::vector<float> q;  // [rows, q heads, dim]
  std::vector<float> k;  // [tokens, kv heads, dim]
  std::vector<float> v;

  int num_rows() const { return static_cast<int>(row_position.size()); }
};

Problem RandomProblem(std::mt19937& rng, const Shape& shape) {
  const auto draw = [&](int low, int high) {
    return std::uniform_int_distribution<>(low, high)(rng);
  };
  std::normal_distribution<float> normal;
  const auto fill = [&](std::size_t count) {
    std::vector<float> values(count);
    for (float& value : values) value = normal(rng);
    return values;
  };
  // Often so short that some ranks see nothing.
  Problem p;
  p.num_tokens = draw(0, 1) == 0 ? draw(1, 5) : draw(1, 4 * shape.block_size);
  const int rows = draw(1, std::min(p.num_tokens, 9));
  for (int i = 0; i < rows; ++i) p.row_position.push_back(p.num_tokens - rows + i);
  if (draw(0, 1) == 0) p.row_position[0] = 0;
  p.q = fill(static_cast<std::size_t>(rows) * shape.num_q_heads * kHeadDim);
  p.k = fill(static_cast<std::size_t>(p.num_tokens) * shape.num_kv_heads * kHeadDim);
  p.v = fill(static_cast<std::size_t>(p.num_tokens) * shape.num_kv_heads * kHeadDim);
  return p;
}

// One long softmax in double: out[dim] of a row and head.
std::vector<double> Reference(const Shape& shape, const Problem& p, int row, int head) {
  const int kv_head = head / (shape.num_q_heads / shape.num_kv_heads);
  std::vector<double> out(kHeadDim);
  double sum = 0;
  for (int t = 0; t <= p.row_position[row]; ++t) {
    double score = 0;
    for (int d = 0; d < kHeadDim; ++d) {
      score += double{p.q[(row * shape.num_q_heads + head) * kHeadDim + d]} *
               p.k[(t * shape.num_kv_heads + kv_head) * kHeadDim + d];
    }
    const double weight = std::exp(score / std::sqrt(kHeadDim));
    sum += weight;
    for (int d = 0; d < kHeadDim; ++d) {
      out[d] += weight * p.v[(t * shape.num_kv_heads + kv_head) * kHeadDim + d];
    }
  }
  for (double& value : out) value /= sum;
  return out;
}

// One DCP rank.
class AttendingRank {
 public:
  AttendingRank(const Shape& shape, const Problem& problem, int rank)
      : shape_(shape), problem_(problem), layout_(shape.Layout(rank)), stream_(1) {}

  // "" or what went wrong. Every rank of the DCP group runs it on `dcp`.
  std::string Run(Communicator& dcp) {
    FillCache();
    auto attention =
        DcpAttention::Create(layout_, kHeadDim, kHeadDim, 9, shape_.exchange, dcp, stream_);
    if (!attention.ok()) return attention.status().ToString();
    WriteQueries(*attention);
    const CollectiveCounters before = dcp.Counters();
    const auto group_q = attention->GatherQueries(problem_.num_rows(), stream_);
    if (!group_q.ok()) return group_q.status().ToString();
    const CollectiveCounters gathered = dcp.Counters();
    if (auto status = Attend(*group_q, *attention); !status.ok()) return status.ToString();
    const auto merged = attention->Merge(problem_.num_rows(), stream_);
    if (!merged.ok()) return merged.status().ToString();
    std::string wrong = CheckBytes(gathered.received_bytes - before.received_bytes,
                                   dcp.Counters().received_bytes - gathered.received_bytes);
    return wrong.empty() ? CheckOutput(*merged, attention->merged_stride()) : wrong;
  }

 private:
  void FillCache() {
    const int b = layout_.block_tokens_per_rank();
    const IndexRange kv = layout_.GroupKvHeads();
    const std::int64_t head_elements = std::int64_t{b} * kHeadDim;
    // Blocks in reverse order; what no token fills is NaN, to see that nobody reads it.
    num_blocks_ = problem_.num_tokens / shape_.block_size + 1;
    k_.assign(num_blocks_ * kv.size() * head_elements, std::nanf(""));
    v_ = k_;
    for (int i = 0; i < num_blocks_; ++i) block_table_.push_back(num_blocks_ - 1 - i);
    for (int t = 0; t < problem_.num_tokens; ++t) {
      if (!layout_.Owns(t)) continue;
      const int offset = layout_.OffsetInBlock(t);
      for (int h = kv.begin; h < kv.end; ++h) {
        const std::int64_t at =
            (block_table_[layout_.BlockIndex(t)] * kv.size() + h - kv.begin) * head_elements;
        for (int d = 0; d < kHeadDim; ++d) {
          const int from = (t * shape_.num_kv_heads + h) * kHeadDim + d;
          k_[at + kernels::KIndex(offset, d, kHeadDim, b)] = problem_.k[from];
          v_[at + kernels::VIndex(offset, d, kHeadDim)] = problem_.v[from];
        }
      }
    }
    for (int position : problem_.row_position) {
      visible_len_.push_back(static_cast<std::int32_t>(layout_.LocalLength(position + 1)));
    }
  }

  void WriteQueries(const DcpAttention& attention) {
    float* out = attention.Queries(problem_.num_rows());
    const IndexRange heads = layout_.ProjectedQHeads();
    for (int row = 0; row < problem_.num_rows(); ++row) {
      const float* from = problem_.q.data() + (row * shape_.num_q_heads + heads.begin) * kHeadDim;
      std::copy_n(from, heads.size() * kHeadDim, out + row * attention.query_stride());
    }
  }

  absl::Status Attend(const float* q, const DcpAttention& attention) {
    const std::vector<std::int32_t> zeros(problem_.num_rows());
    std::vector<std::byte> workspace(kernels::GqaAttentionWorkspaceBytes(
        9, layout_.GroupQHeads().size(), kHeadDim, kHeadDim, stream_));
    return kernels::GqaAttention({.q = q,
                                  .k_blocks = k_.data(),
                                  .v_blocks = v_.data(),
                                  .block_table = block_table_.data(),
                                  .row_slot = zeros.data(),
                                  .first_visible = zeros.data(),
                                  .visible_len = visible_len_.data(),
                                  .out = attention.PartialOutput(),
                                  .lse = attention.PartialLse(),
                                  .num_rows = problem_.num_rows(),
                                  .num_q_heads = layout_.GroupQHeads().size(),
                                  .num_kv_heads = layout_.GroupKvHeads().size(),
                                  .first_q_head = layout_.GroupQHeads().begin,
                                  .first_kv_head = layout_.GroupKvHeads().begin,
                                  .q_per_kv = layout_.q_per_kv(),
                                  .head_dim = kHeadDim,
                                  .value_dim = kHeadDim,
                                  .block_tokens_per_rank = layout_.block_tokens_per_rank(),
                                  .max_blocks_per_seq = num_blocks_,
                                  .kv_dtype = DType::kFloat32,
                                  .scale = 1.0F / std::sqrt(float{kHeadDim})},
                                 workspace.data(), stream_);
  }

  // Bytes received per rank and layer, F = (N - 1) / N and Hg = N * ceil(Hq / T) padded heads:
  // queries F * R * Hg * D * 4, none where they are replicated; a2a F * R * Hg * (D * 4 + 4); ag_rs
  // F * R * Hg * D * 4 for the outputs and (N - 1) * R * Hg * 4 for the LSEs.
  std::string CheckBytes(std::uint64_t for_queries, std::uint64_t for_merge) const {
    const std::uint64_t n = shape_.dcp;
    const std::uint64_t padded = (shape_.num_q_heads + shape_.tp - 1) / shape_.tp;
    const std::uint64_t others = (n - 1) * problem_.num_rows() * padded;  // F * R * Hg
    const std::uint64_t merge = shape_.exchange == DcpExchange::kA2a
                                    ? others * (kHeadDim * 4 + 4)
                                    : others * kHeadDim * 4 + others * n * 4;
    const std::uint64_t queries = shape_.replicate_query ? 0 : others * kHeadDim * 4;
    if (for_queries == queries && for_merge == merge) return "";
    return fmt::format("received {} and {} bytes, expected {} and {}", for_queries, for_merge,
                       queries, merge);
  }

  std::string CheckOutput(const float* merged, std::int64_t stride) const {
    const IndexRange heads = layout_.QHeads();
    for (int row = 0; row < problem_.num_rows(); ++row) {
      for (int h = heads.begin; h < heads.end; ++h) {
        const std::vector<double> want = Reference(shape_, problem_, row, h);
        for (int d = 0; d < kHeadDim; ++d) {
          const float got = merged[row * stride + (h - heads.begin) * kHeadDim + d];
          if (std::abs(got - want[d]) <= 2e-5) continue;
          return fmt::format("row {} (position {}) head {} dim {}: {} instead of {}", row,
                             problem_.row_position[row], h, d, got, want[d]);
        }
      }
    }
    return "";
  }

  const Shape& shape_;
  const Problem& problem_;
  const ShardLayout layout_;
  kernels::CpuStream stream_;
  int num_blocks_ = 0;
  std::vector<float> k_;
  std::vector<float> v_;
  std::vector<std::int32_t> block_table_;
  std::vector<std::int32_t> visible_len_;
};

// All ranks of all DCP groups of `shape`, on threads.
std::vector<std::string> RunShape(const Shape& shape, const std::vector<Problem>& problems) {
  return RunOnThreads(shape.tp, [&](RankContext& context) -> std::string {
    const int first = context.rank / shape.dcp * shape.dcp;
    const ShardLayout layout = shape.Layout(context.rank);
    std::unique_ptr<Communicator> dcp =
        shape.dcp == 1
            ? MakeSelfCommunicator()
            : MakeFabricCommunicator(
                  context.mux, context.rank - first,
                  absl::MakeSpan(context.peers).subspan(first, shape.dcp),
                  absl::MakeSpan(context.tags).subspan(first, shape.dcp),
                  {.id = static_cast<std::uint32_t>(1 + layout.dcp_group()),
                   .max_bytes = DcpAttention::MaxCollectiveBytes(layout, kHeadDim, kHeadDim, 9)});
    for (std::size_t i = 0; i < problems.size(); ++i) {
      std::string wrong = AttendingRank(shape, problems[i], context.rank).Run(*dcp);
      if (!wrong.empty()) return fmt::format("problem {}: {}", i, wrong);
    }
    return "";
  });
}

TEST(DcpAttentionTest, EqualsOneLongSoftmaxAndMovesTheBytesOfTheFormulas) {
  struct Parallel {
    int tp, dcp;
  };
  struct Heads {
    int q, kv;
  };
  std::mt19937 rng(1);
  int shapes = 0;
  for (const auto& [tp, dcp] : {Parallel{1, 1}, {2, 2}, {3, 3}, {4, 4}, {4, 2}, {2, 1}}) {
    for (const auto& [q, kv] : {Heads{8, 1}, {8, 2}, {9, 3}, {7, 7}, {7, 1}}) {
      for (DcpExchange exchange : {DcpExchange::kAgRs, DcpExchange::kA2a}) {
        const int interleave = std::vector{1, 2, 4, 16}[++shapes % 4];
        const Shape shape{.tp = tp,
                          .dcp = dcp,
                          .num_q_heads = q,
                          .num_kv_heads = kv,
                          .interleave = interleave,
                          .block_size = dcp * interleave * (1 + shapes % 3),
                          .exchange = exchange,
                          .replicate_query = shapes / 4 % 2 == 1};
        SCOPED_TRACE(shape.Name());
        std::vector<Problem> problems;
        for (int i = 0; i < 10; ++i) problems.push_back(RandomProblem(rng, shape));
        EXPECT_THAT(RunShape(shape, problems), Each(IsEmpty()));
      }
    }
  }
}

TEST(DcpAttentionTest, NamesAreThoseOfTheFlag) {
  EXPECT_EQ(ParseDcpExchange("ag_rs"), DcpExchange::kAgRs);
  EXPECT_EQ(ParseDcpExchange("a2a"), DcpExchange::kA2a);
  EXPECT_EQ(ParseDcpExchange("A2A"), std::nullopt);
  EXPECT_EQ(DcpExchangeName(DcpExchange::kA2a), "a2a");
}

}  // namespace
}  // namespace weft
