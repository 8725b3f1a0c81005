#pragma once

#include <cstdint>
#include <random>

namespace weft {

// A number that nobody can guess: for ids, keys and generations.
inline std::uint64_t DrawUint64() {
  thread_local std::random_device device;
  return std::uniform_int_distribution<std::uint64_t>()(device);
}

}  // namespace weft
