#pragma once

#include <string_view>

#include "absl/status/status.h"

namespace weft::kernels {

// Which instruction set the CPU kernels run on, for the whole process: the best that this CPU has
// of "scalar" (plain C++), "sse4", "avx2", "avx512" and "avx512_bf16" (the same with dot products
// of bfloat16 and of 16-bit integers), unless WEFT_CPU_TARGET names a lower one.

// Reads WEFT_CPU_TARGET, once; later calls return the same. INVALID_ARGUMENT if it names no target,
// FAILED_PRECONDITION if this CPU lacks it: each says what is allowed. Call it before the first
// CpuStream, whose constructor takes an error for a broken invariant.
absl::Status InitCpuTarget();

// Switches to `name` ("" is the best there is). For tests and benchmarks; no launch may be running.
absl::Status ForceCpuTarget(std::string_view name);

// Whether that is "avx512_bf16": then a product whose weights are not fp32 or float16 rounds its
// input, too (linear.h), and attention what it is allowed to (attention.h).
bool HasDotProducts();

// The target in use, as named above; for the start-up log.
std::string_view CpuTargetName();

}  // namespace weft::kernels
