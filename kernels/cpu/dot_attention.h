#pragma once

#include <cstdint>

#include "kernels/attention.h"
#include "kernels/cpu/attention_parts.h"

namespace weft::kernels {

// Rounds `count` values, an even number, to pairs of bfloat16 in the first half of their memory: to
// nearest even, what is below the normal numbers to zero.
void RoundToPairs(float* values, std::int64_t count);

// As AttendKeys() (attention-inl.h) of K and V that are not latents, by instructions that multiply
// pairs of bfloat16: K, V and the softmax's weights are rounded as RoundToPairs() does, and the sum
// that divides is of the rounded weights. scratch.q: scaled for scores in base 2 (times log2(e)),
// through RoundToPairs(). On a CPU that HasDotProducts().
void DotAttendKeys(const GqaAttentionParams& p, const AttentionItem& item, const TileKeys& keys,
                   const AttentionScratch& scratch, float* records);

}  // namespace weft::kernels
