#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/stream.h"

// A mixture of experts, but for the products (GroupedLinear): which experts a row goes to, the rows
// of each expert, and the sum over a row's experts. Whatever the batch, a row's results are the
// same.

namespace weft::kernels {

enum class ExpertScore : std::uint8_t { kSoftmax, kSigmoid };  // over all experts; of each

// How groups of consecutive experts are ranked, of which only the best are chosen from.
enum class GroupScore : std::uint8_t { kNone, kBest, kSumOfBestTwo };
inline constexpr std::int32_t kMaxExpertGroups = 64;

struct RouteRowsParams {
  const float* logits;    // [num_rows, num_experts]
  const float* bias;      // [num_experts], added to a score to rank it, not to weigh; or null
  std::int32_t* experts;  // [num_rows, top_k], different ones, best first; of equals the lower id
  float* weights;         // [num_rows, top_k]
  float* scratch;         // [num_rows, 2 * num_experts]
  std::int32_t num_rows;
  std::int32_t num_experts;
  std::int32_t top_k;  // at most the experts of top_groups groups
  ExpertScore score;
  GroupScore group_score;
  std::int32_t num_groups;  // divides num_experts; at most kMaxExpertGroups
  std::int32_t top_groups;
  bool normalize;  // weights sum to `scale`
  float scale;     // of the weights
};

absl::Status RouteRows(const RouteRowsParams& params, Stream& stream);

// The routed rows of experts [first_expert, first_expert + num_local), expert by expert, each in
// the order of the rows: row_of[i] is the row, place_of[row * top_k + j] is the i of its j-th
// expert, -1 where that expert is not among these. Expert e has
// [expert_begin[e - first_expert], expert_begin[e - first_expert + 1]). No row is dropped.
struct SortByExpertParams {
  const std::int32_t* experts;  // [num_rows, top_k]
  std::int32_t* row_of;         // [num_rows * top_k]
  std::int32_t* place_of;       // [num_rows * top_k]
  std::int32_t* expert_begin;   // [num_local + 1]
  std::int32_t num_rows;
  std::int32_t top_k;
  std::int32_t first_expert;
  std::int32_t num_local;
};

absl::Status SortByExpert(const SortByExpertParams& params, Stream& stream);

// out[row] = residual[row] + sum over j of weights[row, j] * in[place_of[row, j]], j ascending.
struct CombineExpertsParams {
  const float* in;               // [routed rows, size]
  const std::int32_t* place_of;  // [num_rows, top_k]; -1 adds nothing
  const float* weights;          // [num_rows, top_k]
  const float* residual;         // [num_rows, size], or null; may be out
  float* out;                    // [num_rows, size]
  std::int32_t num_rows;
  std::int32_t top_k;
  std::int32_t size;
};

absl::Status CombineExperts(const CombineExpertsParams& params, Stream& stream);

}  // namespace weft::kernels
