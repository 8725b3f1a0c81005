#include "kernels/moe.h"

#include <algorithm>
#include <cmath>
#include <limits>

#include "kernels/cpu/launch.h"

namespace weft::kernels {
namespace {

constexpr float kLowest = -std::numeric_limits<float>::infinity();

void Score(const RouteRowsParams& p, const float* logits, float* scores) {
  if (p.score == ExpertScore::kSigmoid) {
    for (std::int32_t e = 0; e < p.num_experts; ++e)
      scores[e] = 1.0F / (1.0F + std::exp(-logits[e]));
    return;
  }
  const float max = *std::max_element(logits, logits + p.num_experts);
  float sum = 0.0F;
  for (std::int32_t e = 0; e < p.num_experts; ++e) {
    scores[e] = std::exp(logits[e] - max);
    sum += scores[e];
  }
  for (std::int32_t e = 0; e < p.num_experts; ++e) scores[e] /= sum;
}

float ScoreOfGroup(GroupScore how, const float* ranks, std::int32_t size) {
  float best = kLowest;
  float second = kLowest;
  for (std::int32_t i = 0; i < size; ++i) {
    if (ranks[i] > best) {
      second = best;
      best = ranks[i];
    } else if (ranks[i] > second) {
      second = ranks[i];
    }
  }
  return how == GroupScore::kBest || size == 1 ? best : best + second;
}

// The first of the largest that is not among the `count` taken before. Never one of those, even
// where values are not numbers: buffers rely on it.
std::int32_t BestBut(const std::int32_t* taken, std::int32_t count, const float* ranks,
                     std::int32_t size) {
  std::int32_t best = -1;
  for (std::int32_t i = 0; i < size; ++i) {
    if (best >= 0 && !(ranks[i] > ranks[best])) continue;
    if (std::find(taken, taken + count, i) == taken + count) best = i;
  }
  return best;
}

// Takes all experts but those of the best groups out of the running.
void KeepBestGroups(const RouteRowsParams& p, float* ranks) {
  const std::int32_t size = p.num_experts / p.num_groups;
  const auto score = [&](std::int32_t group) {
    return ScoreOfGroup(p.group_score, ranks + group * size, size);
  };
  std::uint64_t dropped = 0;
  for (std::int32_t group = 0; group < p.num_groups; ++group) {
    std::int32_t before = 0;
    const float own = score(group);
    for (std::int32_t other = 0; other < p.num_groups; ++other) {
      const float theirs = score(other);
      before += theirs > own || (theirs == own && other < group);
    }
    if (before >= p.top_groups) dropped |= std::uint64_t{1} << group;
  }
  for (std::int32_t group = 0; group < p.num_groups; ++group) {
    if ((dropped >> group & 1) != 0) std::fill_n(ranks + group * size, size, kLowest);
  }
}

void RouteRow(const RouteRowsParams& p, std::int64_t row) {
  std::int32_t* experts = p.experts + row * p.top_k;
  float* weights = p.weights + row * p.top_k;
  float* scores = p.scratch + row * 2 * p.num_experts;
  float* ranks = scores + p.num_experts;
  Score(p, p.logits + row * p.num_experts, scores);
  for (std::int32_t e = 0; e < p.num_experts; ++e) {
    ranks[e] = p.bias == nullptr ? scores[e] : scores[e] + p.bias[e];
  }
  if (p.group_score != GroupScore::kNone) KeepBestGroups(p, ranks);
  float sum = 0.0F;
  for (std::int32_t j = 0; j < p.top_k; ++j) {
    experts[j] = BestBut(experts, j, ranks, p.num_experts);
    weights[j] = scores[experts[j]];
    sum += weights[j];
  }
  for (std::int32_t j = 0; j < p.top_k; ++j) {
    if (p.normalize) weights[j] /= sum + 1e-20F;  // as the reference; sigmoids may all be 0
    weights[j] *= p.scale;
  }
}

}  // namespace

absl::Status RouteRows(const RouteRowsParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->RouteRows(params);
  DCHECK(params.num_groups <= kMaxExpertGroups);
  ParallelRows(PoolOf(stream), params.num_rows,
               std::int64_t{params.num_experts} * (8 + params.top_k),
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) RouteRow(params, row);
               });
  return absl::OkStatus();
}

absl::Status SortByExpert(const SortByExpertParams& p, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->SortByExpert(p);
  const std::int64_t count = std::int64_t{p.num_rows} * p.top_k;
  const auto local = [&](std::int64_t i) { return p.experts[i] - p.first_expert; };
  const auto is_local = [&](std::int64_t i) { return local(i) >= 0 && local(i) < p.num_local; };
  std::fill_n(p.expert_begin, p.num_local + 1, 0);
  for (std::int64_t i = 0; i < count; ++i) {
    if (is_local(i)) ++p.expert_begin[local(i) + 1];
  }
  for (std::int32_t e = 0; e < p.num_local; ++e) p.expert_begin[e + 1] += p.expert_begin[e];
  // Each expert's begin moves to its end, which is the next one's begin, and then all move back.
  for (std::int64_t i = 0; i < count; ++i) {
    p.place_of[i] = is_local(i) ? p.expert_begin[local(i)]++ : -1;
    if (p.place_of[i] >= 0) p.row_of[p.place_of[i]] = static_cast<std::int32_t>(i / p.top_k);
  }
  std::copy_backward(p.expert_begin, p.expert_begin + p.num_local,
                     p.expert_begin + p.num_local + 1);
  p.expert_begin[0] = 0;
  return absl::OkStatus();
}

absl::Status CombineExperts(const CombineExpertsParams& p, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->CombineExperts(p);
  ParallelRows(PoolOf(stream), p.num_rows, std::int64_t{p.size} * p.top_k,
               [&](std::int64_t begin, std::int64_t end) {
                 for (std::int64_t row = begin; row < end; ++row) {
                   float* out = p.out + row * p.size;
                   if (p.residual == nullptr) {
                     std::fill_n(out, p.size, 0.0F);
                   } else if (p.residual != p.out) {
                     std::copy_n(p.residual + row * p.size, p.size, out);
                   }
                   for (std::int64_t j = row * p.top_k; j < (row + 1) * p.top_k; ++j) {
                     if (p.place_of[j] < 0) continue;
                     const float weight = p.weights[j];
                     const float* in = p.in + std::int64_t{p.place_of[j]} * p.size;
                     for (std::int32_t i = 0; i < p.size; ++i) out[i] += weight * in[i];
                   }
                 }
               });
  return absl::OkStatus();
}

}  // namespace weft::kernels
