// x / (1 + exp(-x)), for each CPU target: included by files that use Highway's foreach_target, once
// a target (hence no #pragma once).

#if defined(WEFT_KERNELS_CPU_SILU_INL_H_) == defined(HWY_TARGET_TOGGLE)
#ifdef WEFT_KERNELS_CPU_SILU_INL_H_
#undef WEFT_KERNELS_CPU_SILU_INL_H_
#else
#define WEFT_KERNELS_CPU_SILU_INL_H_
#endif

#include "hwy/contrib/math/math-inl.h"
#include "hwy/highway.h"

HWY_BEFORE_NAMESPACE();
namespace weft::kernels::HWY_NAMESPACE {

template <class Tag, class Vec>
HWY_INLINE Vec Silu(Tag tag, Vec x) {
  namespace hn = hwy::HWY_NAMESPACE;
  // Exp ends at e^104; at e^87 the quotient is 0 to within 1e-36 already.
  const Vec e = hn::Exp(tag, hn::Min(hn::Neg(x), hn::Set(tag, 87.0F)));
  return hn::Div(x, hn::Add(hn::Set(tag, 1.0F), e));
}

}  // namespace weft::kernels::HWY_NAMESPACE
HWY_AFTER_NAMESPACE();

#endif  // include guard
