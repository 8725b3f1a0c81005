#pragma once

#include <cstdint>

#include "absl/status/status.h"
#include "kernels/device/stream.h"

// Between a DCP group's heads side by side, [num_rows, group heads, head_dim], and the padded
// per-rank parts that collectives carry, [num_parts, num_rows, padded_heads, head_dim]: part p
// holds group heads [part_begin[p], part_begin[p + 1]), then padding.

namespace weft::kernels {

struct HeadExchangeParams {
  const std::int32_t*
      part_begin;  // [num_parts + 1]; part_begin[num_parts] is the number of group heads
  std::int32_t num_parts;
  std::int32_t num_rows;
  std::int32_t padded_heads;
  std::int32_t head_dim;
  std::int64_t part_stride;  // floats from part to part of `parts`
};

// heads <- parts; padding is not read.
absl::Status UnpackHeads(const HeadExchangeParams& params, const float* parts, float* heads,
                         Stream& stream);

// parts <- heads; padding is filled with `padding` (0 for values, -inf for LSE with head_dim 1).
absl::Status PackHeads(const HeadExchangeParams& params, const float* heads, float padding,
                       float* parts, Stream& stream);

}  // namespace weft::kernels
