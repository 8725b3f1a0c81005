#pragma once

#include <type_traits>

namespace weft {

// a / b, rounded up; of integers that are not negative.
template <typename A, typename B>
constexpr std::common_type_t<A, B> CeilDiv(A a, B b) {
  return (a + b - 1) / b;
}

}  // namespace weft
