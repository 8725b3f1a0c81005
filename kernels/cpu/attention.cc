#include "kernels/attention.h"

#include <algorithm>
#include <cmath>
#include <cstdint>
#include <limits>
#include <numbers>

#include "fmt/format.h"
#include "kernels/cpu/attention_parts.h"
#include "kernels/cpu/convert.h"
#include "kernels/cpu/dot_attention.h"
#include "kernels/cpu/launch.h"
#include "kernels/device/cpu_target.h"

#undef HWY_TARGET_INCLUDE
#define HWY_TARGET_INCLUDE "kernels/cpu/attention.cc"
#include "hwy/foreach_target.h"
#include "hwy/highway.h"
#include "kernels/cpu/attention-inl.h"

#if HWY_ONCE
namespace weft::kernels {

HWY_EXPORT(AttendKeys);
HWY_EXPORT(AppendRows);

namespace {

// Parts of the keys that may be computed side by side before they are merged, at one row.
constexpr std::int64_t kParallelParts = 64;

bool UsesDots(const GqaAttentionParams& params) {
  return params.round_to_bfloat16 && params.v_blocks != nullptr && HasDotProducts();
}

std::int64_t ScratchQueries(std::int64_t num_q_heads) {
  return std::max(kTileQueries, num_q_heads);
}

// One launch: its items, and where things are in the workspace:
//   [num_rows * num_q_heads] records     running results, when parts are computed side by side
//   [(num_rows + kParallelParts) * num_q_heads] records   the parts
//   [num_threads] AttentionScratch
//   [num_rows + 1] int32                 first row of each row tile
class Launch {
 public:
  Launch(const GqaAttentionParams& params, void* workspace, ThreadPool& pool)
      : p_(params),
        pool_(pool),
        dots_(UsesDots(params)),
        attend_(dots_ ? DotAttendKeys : HWY_DYNAMIC_DISPATCH(AttendKeys)),
        queries_(std::int64_t{params.num_rows} * params.num_q_heads),
        record_floats_(RecordFloats(params.value_dim)),
        scratch_floats_(AttentionScratch::Floats(ScratchQueries(params.num_q_heads),
                                                 params.head_dim, params.value_dim)) {
    running_ = static_cast<float*>(workspace);
    parts_ = running_ + queries_ * record_floats_;
    scratch_ = parts_ + (queries_ + kParallelParts * params.num_q_heads) * record_floats_;
    tiles_ = reinterpret_cast<std::int32_t*>(scratch_ + scratch_floats_ * pool.num_threads());
    CutRows();
  }

  void Run() {
    const std::int64_t items = NumItems();
    std::int64_t most_parts = 0;
    std::int64_t all_parts = 0;
    for (std::int64_t i = 0; i < items; ++i) {
      const auto [begin, end] = Visible(Item(i));
      const std::int64_t parts = CeilDiv(end, kPartKeys) - begin / kPartKeys;
      most_parts = std::max(most_parts, parts);
      all_parts += parts;
    }
    // Parts side by side when an item alone would keep the other threads waiting.
    if (most_parts > 1 && most_parts * 4 * pool_.num_threads() > all_parts) {
      RunPartsInParallel();
    } else {
      // The last rows of a prompt see the most: start with them.
      pool_.ParallelFor(items, [&](std::int64_t i, int thread) { RunItem(items - 1 - i, thread); });
    }
  }

 private:
  // Row tiles: adjacent rows of one sequence, so that its keys are read once for all of them.
  void CutRows() {
    const std::int32_t most = std::max<std::int32_t>(
        1, static_cast<std::int32_t>(kTileQueries) / std::min(p_.q_per_kv, p_.num_q_heads));
    num_tiles_ = 0;
    for (std::int32_t row = 0; row < p_.num_rows; ++row) {
      if (row == 0 || p_.row_slot[row] != p_.row_slot[row - 1] ||
          row - tiles_[num_tiles_ - 1] == most) {
        tiles_[num_tiles_++] = row;
      }
    }
    tiles_[num_tiles_] = p_.num_rows;
  }

  std::int64_t NumItems() const { return num_tiles_ * p_.num_kv_heads; }

  AttentionItem Item(std::int64_t index) const {
    const std::int64_t tile = index / p_.num_kv_heads;
    const std::int64_t kv_head = index % p_.num_kv_heads;
    const std::int64_t first = (p_.first_kv_head + kv_head) * p_.q_per_kv - p_.first_q_head;
    const auto clamp = [&](std::int64_t head) {
      return std::clamp<std::int64_t>(head, 0, p_.num_q_heads);
    };
    return {.first_row = tiles_[tile],
            .end_row = tiles_[tile + 1],
            .kv_head = kv_head,
            .first_head = clamp(first),
            .end_head = clamp(first + p_.q_per_kv)};
  }

  // The keys that some row of the item sees.
  std::pair<std::int64_t, std::int64_t> Visible(const AttentionItem& item) const {
    std::int64_t begin = std::numeric_limits<std::int64_t>::max();
    std::int64_t end = 0;
    if (item.first_head < item.end_head) {
      for (std::int64_t row = item.first_row; row < item.end_row; ++row) {
        if (p_.first_visible[row] >= p_.visible_len[row]) continue;
        begin = std::min<std::int64_t>(begin, p_.first_visible[row]);
        end = std::max<std::int64_t>(end, p_.visible_len[row]);
      }
    }
    return {std::min(begin, end), end};
  }

  AttentionScratch Scratch(int thread) const {
    return {scratch_ + thread * scratch_floats_, ScratchQueries(p_.num_q_heads), p_.head_dim,
            p_.value_dim};
  }

  void ScaleQueries(const AttentionItem& item, float* const scaled) const {
    const float scale = dots_ ? p_.scale * std::numbers::log2e_v<float> : p_.scale;
    float* q = scaled;
    for (std::int64_t row = item.first_row; row < item.end_row; ++row) {
      const std::int64_t count = (item.end_head - item.first_head) * p_.head_dim;
      const float* in = p_.q + (row * p_.num_q_heads + item.first_head) * p_.head_dim;
      for (std::int64_t i = 0; i < count; ++i) q[i] = in[i] * scale;
      q += count;
    }
    if (dots_) RoundToPairs(scaled, q - scaled);
  }

  void ClearRecords(const AttentionItem& item, float* records) const {
    for (std::int64_t i = 0; i < NumQueries(item); ++i) {
      float* record = records + i * record_floats_;
      std::fill_n(record, record_floats_, 0.0F);
      record[record_floats_ - 16] = -std::numeric_limits<float>::infinity();
    }
  }

  // Merges a part into the running records, in the order of the parts.
  void MergePart(const AttentionItem& item, const float* part, float* running) const {
    const std::int64_t dim = record_floats_ - 16;
    for (std::int64_t i = 0; i < NumQueries(item); ++i) {
      const float* from = part + i * record_floats_;
      float* to = running + i * record_floats_;
      if (from[dim + 1] == 0.0F) continue;
      const float max = std::max(to[dim], from[dim]);
      const float keep = std::exp(to[dim] - max);
      const float add = std::exp(from[dim] - max);
      for (std::int64_t j = 0; j < dim; ++j) to[j] = to[j] * keep + from[j] * add;
      to[dim + 1] = to[dim + 1] * keep + from[dim + 1] * add;
      to[dim] = max;
    }
  }

  void StoreResult(const AttentionItem& item, const float* running) const {
    const std::int64_t dim = record_floats_ - 16;
    for (std::int64_t row = item.first_row; row < item.end_row; ++row) {
      for (std::int64_t head = item.first_head; head < item.end_head; ++head) {
        const std::int64_t query = row * p_.num_q_heads + head;
        const float max = running[dim];
        const float sum = running[dim + 1];
        const bool empty = sum == 0.0F;
        const float factor = empty ? 0.0F : 1.0F / sum;
        float* out = p_.out + query * p_.value_dim;
        for (std::int64_t i = 0; i < p_.value_dim; ++i) out[i] = running[i] * factor;
        p_.lse[query] = empty ? -std::numeric_limits<float>::infinity() : max + std::log(sum);
        running += record_floats_;
      }
    }
  }

  // One part's records.
  void Attend(const AttentionItem& item, std::int64_t begin, std::int64_t end,
              const AttentionScratch& scratch, float* records) const {
    ClearRecords(item, records);
    for (std::int64_t tile = begin / kTileKeys * kTileKeys; tile < end; tile += kTileKeys) {
      attend_(p_, item,
              {.slot = p_.row_slot[item.first_row],
               .kv_head = item.kv_head,
               .tile = tile,
               .begin = std::max(begin, tile),
               .end = std::min(end, tile + kTileKeys),
               .last = p_.visible_len[item.end_row - 1]},
              scratch, records);
    }
  }

  void RunItem(std::int64_t index, int thread) const {
    const AttentionItem item = Item(index);
    const AttentionScratch scratch = Scratch(thread);
    const auto [begin, end] = Visible(item);
    ClearRecords(item, scratch.running);
    ScaleQueries(item, scratch.q);
    for (std::int64_t part = begin / kPartKeys * kPartKeys; part < end; part += kPartKeys) {
      Attend(item, std::max(begin, part), std::min(end, part + kPartKeys), scratch, scratch.part);
      MergePart(item, scratch.part, scratch.running);
    }
    StoreResult(item, scratch.running);
  }

  // Where the records of an item start, among those of all queries.
  std::int64_t FirstRecord(const AttentionItem& item) const {
    return item.first_row * p_.num_q_heads + (item.end_row - item.first_row) * item.first_head;
  }

  void RunPartsInParallel() const {
    const std::int64_t items = NumItems();
    std::int64_t last_key = 0;
    for (std::int64_t i = 0; i < items; ++i) {
      const AttentionItem item = Item(i);
      last_key = std::max(last_key, Visible(item).second);
      ClearRecords(item, running_ + FirstRecord(item) * record_floats_);
    }
    const std::int64_t num_parts = CeilDiv(last_key, kPartKeys);
    const std::int64_t side_by_side = 1 + kParallelParts / p_.num_rows;
    for (std::int64_t first = 0; first < num_parts; first += side_by_side) {
      const std::int64_t count = std::min(side_by_side, num_parts - first);
      pool_.ParallelFor(items * count, [&](std::int64_t i, int thread) {
        RunPart(i % items, (first + i / items) * kPartKeys, i / items, thread);
      });
      pool_.ParallelFor(items, [&](std::int64_t i, int /*thread*/) {
        const AttentionItem item = Item(i);
        float* running = running_ + FirstRecord(item) * record_floats_;
        for (std::int64_t place = 0; place < count; ++place) {
          MergePart(item, PartRecords(item, place), running);
        }
        if (first + count == num_parts) StoreResult(item, running);
      });
    }
  }

  float* PartRecords(const AttentionItem& item, std::int64_t place) const {
    return parts_ + (place * queries_ + FirstRecord(item)) * record_floats_;
  }

  void RunPart(std::int64_t index, std::int64_t part, std::int64_t place, int thread) const {
    const AttentionItem item = Item(index);
    const AttentionScratch scratch = Scratch(thread);
    const auto [begin, end] = Visible(item);
    ScaleQueries(item, scratch.q);
    Attend(item, std::max(begin, part), std::min(end, part + kPartKeys), scratch,
           PartRecords(item, place));
  }

  const GqaAttentionParams& p_;
  ThreadPool& pool_;
  bool dots_;
  decltype(&DotAttendKeys) attend_;
  std::int64_t queries_;  // rows times heads
  std::int64_t record_floats_;
  std::int64_t scratch_floats_;
  std::int64_t num_tiles_ = 0;
  float* running_;
  float* parts_;
  float* scratch_;
  std::int32_t* tiles_;
};

}  // namespace

absl::Status GqaAttention(const GqaAttentionParams& params, void* workspace, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->GqaAttention(params, workspace);
  const bool latent = params.v_blocks == nullptr;
  const int max_head_dim = latent ? kMaxLatentDim : kMaxHeadDim;
  if (params.head_dim <= 0 || params.head_dim % 8 != 0 || params.head_dim > max_head_dim) {
    return absl::InvalidArgumentError(
        fmt::format("head_dim is {}; GqaAttention supports multiples of 8 up to {}",
                    params.head_dim, max_head_dim));
  }
  if (params.value_dim <= 0 || params.value_dim > params.head_dim ||
      (!latent && params.value_dim != params.head_dim)) {
    return absl::InvalidArgumentError(fmt::format("value_dim is {} with head_dim {}{}",
                                                  params.value_dim, params.head_dim,
                                                  latent ? "" : "; it must be the same"));
  }
  if (params.num_rows == 0 || params.num_q_heads == 0) return absl::OkStatus();
  Launch(params, workspace, PoolOf(stream)).Run();
  return absl::OkStatus();
}

std::int64_t GqaAttentionWorkspaceBytes(std::int32_t max_rows, std::int32_t num_q_heads,
                                        std::int32_t head_dim, std::int32_t value_dim,
                                        const Stream& stream) {
  if (const DeviceStream* const device = OnDevice(stream)) {
    return device->GqaAttentionWorkspaceBytes(max_rows, num_q_heads, value_dim);
  }
  const std::int64_t threads = static_cast<const CpuStream&>(stream).num_threads();
  const std::int64_t records = (std::int64_t{max_rows} * 2 + kParallelParts) * num_q_heads;
  return (records * RecordFloats(value_dim) +
          AttentionScratch::Floats(ScratchQueries(num_q_heads), head_dim, value_dim) * threads) *
             static_cast<std::int64_t>(sizeof(float)) +
         (std::int64_t{max_rows} + 1) * static_cast<std::int64_t>(sizeof(std::int32_t));
}

absl::Status KvAppend(const KvAppendParams& params, Stream& stream) {
  if (DeviceStream* const device = OnDevice(stream)) return device->KvAppend(params);
  if (params.head_dim > kMaxLatentDim) {
    return absl::InvalidArgumentError(
        fmt::format("head_dim is {}; KvAppend supports up to {}", params.head_dim, kMaxLatentDim));
  }
  const std::int64_t row_cost = std::int64_t{8} * params.num_kv_heads * params.head_dim;
  const auto append = HWY_DYNAMIC_DISPATCH(AppendRows);
  ParallelRows(PoolOf(stream), params.num_rows, row_cost,
               [&](std::int64_t begin, std::int64_t end) { append(params, begin, end); });
  return absl::OkStatus();
}

}  // namespace weft::kernels
#endif  // HWY_ONCE
