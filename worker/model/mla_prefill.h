#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <vector>

#include "absl/status/statusor.h"
#include "kernels/device/buffer.h"
#include "worker/model/paged_attention.h"

namespace weft {

// How a prompt's rows attend under MLA. Absorbed, a key costs 2 * (latent + rope + latent)
// operations a head and row, and nothing beforehand; decompressed, 2 * (nope + rope + v), once its
// K and V have been made of its latent. A rank decompresses for its own heads alone, out of the
// latents that its DCP group gathers: neither queries nor outputs travel, and nothing is merged.
enum class MlaForm : std::uint8_t {
  kAbsorbed,
  kChunk,  // keys of the same step decompressed, those before them absorbed
  kWhole,  // all keys decompressed
};

// What one layer costs a rank for `num_rows` rows after `context` tokens, in any form.
struct MlaCost {
  double operations = 0;
  double bytes = 0;  // received from the DCP group
  // Operations worth a byte: what this kind of machine does in the time that a byte takes.
  double total() const { return operations + 40 * bytes; }
};
MlaCost CostOf(MlaForm form, const ModelConfig& config, const ShardLayout& layout,
               std::int64_t num_rows, std::int64_t context, DcpExchange exchange);

// Attention of a sequence's rows to decompressed keys, for this rank's own heads. Allocates nothing
// after Create(). One thread.
class MlaPrefill {
 public:
  static absl::StatusOr<MlaPrefill> Create(const ModelConfig& config, const ShardLayout& layout,
                                           std::int32_t max_rows, KvCache& cache, Communicator& dcp,
                                           kernels::Stream& stream);

  // The largest collective it asks for.
  static std::int64_t MaxCollectiveBytes(const ModelConfig& config, const ShardLayout& layout,
                                         std::int32_t max_rows);

  // Rows of one sequence in a step: positions [first_position, first_position + num_rows).
  struct Rows {
    std::int32_t slot = 0;
    std::int32_t num_rows = 0;
    std::int64_t first_position = 0;
  };

  // Starts on `rows`, whose queries (this rank's own heads, not rotated) are at `q`, `q_stride`
  // floats from row to row, with their cos and sin.
  absl::Status Begin(const Rows& rows, const float* q, std::int64_t q_stride, const float* cos,
                     const float* sin, kernels::Stream& stream);
  // Adds what the rows attended to elsewhere: values [num_rows, own heads, v_head_dim],
  // `value_stride` floats from row to row, and their LSE, `lse_stride` from row to row.
  absl::Status AddPart(const float* values, std::int64_t value_stride, const float* lse,
                       std::int64_t lse_stride, kernels::Stream& stream);
  // Adds the keys before the rows, and those of the rows themselves, which have been appended.
  absl::Status AddContext(std::int32_t layer, const MlaWeights& weights, const SlotTable& slots,
                          kernels::Stream& stream);
  absl::Status AddChunk(std::int32_t layer, const MlaWeights& weights, const SlotTable& slots,
                        kernels::Stream& stream);
  // Writes the values of all parts, [num_rows, own heads, v_head_dim].
  absl::Status Finish(float* values, std::int64_t value_stride, kernels::Stream& stream);

  std::int64_t workspace_bytes() const;

 private:
  // Keys whose latents are gathered together: of each rank the local entries
  // [begin[r], begin[r] + size[r]).
  struct Tile {
    std::vector<std::int64_t> begin;
    std::vector<std::int32_t> size;
    // Row of the gathered latents where entry i of rank r goes.
    bool by_position = false;
    std::int64_t first_position = 0;
    std::int32_t num_keys = 0;
  };

  MlaPrefill(const ModelConfig& config, const ShardLayout& layout, KvCache& cache,
             Communicator& dcp);

  absl::Status GatherLatents(std::int32_t layer, const SlotTable& slots, kernels::Stream& stream);
  absl::Status Decompress(const MlaWeights& weights, kernels::Stream& stream);
  // Attends to the tile in visible_len_, and merges.
  absl::Status AttendTile(std::int32_t layer, const MlaWeights& weights, const SlotTable& slots,
                          kernels::Stream& stream);
  // Merges part `added_` into part `merged_`.
  absl::Status MergeParts(kernels::Stream& stream);
  float* Part(int index) const { return parts_.as<float>() + index * part_floats_; }
  float* Lse(int index) const { return lse_.as<float>() + index * lse_floats_; }

  const ModelConfig* config_;
  ShardLayout layout_;
  KvCache* cache_;
  Communicator* dcp_;
  std::int32_t heads_ = 0;     // own
  std::int32_t head_dim_ = 0;  // of decompressed K and V, padded with zeros
  std::int64_t part_floats_ = 0;
  std::int64_t lse_floats_ = 0;

  Rows rows_;
  Tile tile_;
  std::int32_t num_parts_ = 0;
  std::array<int, 3> part_ = {0, 1, 2};  // merged so far, to be added, free
  std::vector<std::int32_t> zeros_;      // [rows]
  std::vector<std::int32_t> visible_len_;
  std::vector<std::int64_t> slots_;              // [tile]: 0, 1, ...
  std::vector<kernels::LinearParams> products_;  // [own heads]
  kernels::Buffer q_;                            // [rows, own heads, head_dim]
  kernels::Buffer gathered_;                     // [N, entries of a rank, latent]; empty with N = 1
  kernels::Buffer latents_;                      // [tile, latent]
  kernels::Buffer kv_;                           // K, V: [tile, own heads, head_dim] each
  kernels::Buffer blocks_;                       // the same as blocks of a cache with one block
  kernels::Buffer parts_;                        // three of [rows, own heads, head_dim]
  kernels::Buffer lse_;                          // three of [rows, own heads]
  kernels::Buffer workspace_;
};

}  // namespace weft
