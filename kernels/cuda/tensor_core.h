#pragma once

#include <cstdint>
#include <type_traits>

#include "kernels/cuda/platform.h"
#include "kernels/cuda/values.h"

// All the PTX there is, each with what it does under emulation. Fragments are those of the PTX
// manual: with g = lane / 4 and t = lane % 4, a 16x16 A has in its four registers the pairs of
// columns 2t (and 2t + 8) of rows g and g + 8; a 16x8 B the pairs of rows 2t and 2t + 8 of column
// g; a 16x8 C the columns 2t, 2t + 1 of rows g and g + 8.

namespace weft::kernels::cuda {

#ifdef WEFT_CUDA_EMU
#define WEFT_WHERE_ARGUMENT , ::weft::cuda_emu::Where where = ::weft::cuda_emu::Where::current()
#else
#define WEFT_WHERE_ARGUMENT
#endif

struct Fragment4 {
  std::uint32_t r[4];
};
struct Fragment2 {
  std::uint32_t r[2];
};
struct Accumulator4 {
  float c[4];
};

#ifdef WEFT_CUDA_EMU
namespace emu_detail {

using weft::cuda_emu::kWarpSize;
using weft::cuda_emu::LaneData;

inline void CountConflicts(const std::byte* const rows[8]) {
  int worst = 1;
  for (int i = 0; i < 8; ++i) {
    int in_bank = 0;
    for (int j = 0; j < 8; ++j) {
      bool seen = false;
      for (int k = 0; k < j; ++k) seen |= rows[k] == rows[j];
      const auto bank = [&](int row) {
        return reinterpret_cast<std::uintptr_t>(rows[row]) / 16 % 8;
      };
      in_bank += !seen && bank(j) == bank(i);
    }
    worst = in_bank > worst ? in_bank : worst;
  }
  weft::cuda_emu::CountMatrixLoad(worst - 1);
}

template <bool kTransposed>
void FinishLdMatrix(std::uint32_t mask, LaneData* lanes) {
  if (mask != 0xFFFFFFFF) weft::cuda_emu::Fail("ldmatrix without all lanes");
  const std::byte* rows[kWarpSize];
  std::uint16_t loaded[kWarpSize][8];
  for (int i = 0; i < kWarpSize; ++i) {
    weft::cuda_emu::TakeLane(lanes, i, &rows[i], sizeof(rows[i]));
    if (reinterpret_cast<std::uintptr_t>(rows[i]) % 16 != 0) {
      weft::cuda_emu::Fail("ldmatrix of a row that is not aligned to 16 bytes");
    }
    weft::cuda_emu::NoteRead(rows[i], 16);
    std::memcpy(loaded[i], rows[i], 16);
  }
  for (int matrix = 0; matrix < 4; ++matrix) CountConflicts(rows + matrix * 8);
  for (int lane = 0; lane < kWarpSize; ++lane) {
    std::uint16_t values[8];
    for (int matrix = 0; matrix < 4; ++matrix) {
      for (int i = 0; i < 2; ++i) {
        const int row = lane / 4;
        const int column = lane % 4 * 2 + i;
        values[matrix * 2 + i] =
            kTransposed ? loaded[matrix * 8 + column][row] : loaded[matrix * 8 + row][column];
      }
    }
    weft::cuda_emu::PutLane(lanes, lane, values, sizeof(values));
  }
}

struct MmaOperands {
  Fragment4 a;
  Fragment2 b;
  Accumulator4 c;
};

template <typename T>
void FinishMma(std::uint32_t mask, LaneData* lanes) {
  if (mask != 0xFFFFFFFF) weft::cuda_emu::Fail("mma without all lanes");
  float a[16][16];
  float b[16][8];
  const auto half = [](std::uint32_t pair, int i) {
    return Widen(T{static_cast<std::uint16_t>(pair >> 16 * i)});
  };
  MmaOperands operands[kWarpSize];
  for (int lane = 0; lane < kWarpSize; ++lane) {
    weft::cuda_emu::TakeLane(lanes, lane, &operands[lane], sizeof(MmaOperands));
    const int g = lane / 4;
    const int t = lane % 4;
    for (int i = 0; i < 2; ++i) {
      for (int r = 0; r < 4; ++r)
        a[g + r % 2 * 8][2 * t + i + r / 2 * 8] = half(operands[lane].a.r[r], i);
      for (int r = 0; r < 2; ++r) b[2 * t + i + r * 8][g] = half(operands[lane].b.r[r], i);
    }
  }
  for (int lane = 0; lane < kWarpSize; ++lane) {
    Accumulator4 c = operands[lane].c;
    for (int r = 0; r < 4; ++r) {
      const int row = lane / 4 + r / 2 * 8;
      const int column = lane % 4 * 2 + r % 2;
      float sum = 0.0F;
      for (int k = 0; k < 16; ++k) sum += a[row][k] * b[k][column];
      c.c[r] += sum;
    }
    weft::cuda_emu::PutLane(lanes, lane, &c, sizeof(c));
  }
}

template <typename Result, typename Operands>
Result Together(const char* operation, weft::cuda_emu::Where where, const Operands& operands,
                weft::cuda_emu::Finish finish) {
  static_assert(sizeof(Operands) <= weft::cuda_emu::kLaneBytes);
  const LaneData* lanes =
      weft::cuda_emu::WarpMeet(0xFFFFFFFF, operation, where, weft::cuda_emu::Memory::kUnordered,
                               &operands, sizeof(operands), finish);
  Result result;
  weft::cuda_emu::TakeLane(lanes, weft::cuda_emu::current_thread->lane, &result, sizeof(result));
  return result;
}

}  // namespace emu_detail
#endif

// Four 8x8 matrices of 16-bit values from shared memory: matrix i's rows are where lanes
// 8i ... 8i + 7 point. Register i of the result is matrix i's; with kTransposed, of its transpose.
template <bool kTransposed>
__device__ __forceinline__ Fragment4 LdMatrixX4(const void* row WEFT_WHERE_ARGUMENT) {
#ifdef WEFT_CUDA_EMU
  return emu_detail::Together<Fragment4>("ldmatrix", where, row,
                                         emu_detail::FinishLdMatrix<kTransposed>);
#else
  Fragment4 f;
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(row));
  if constexpr (kTransposed) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
                 : "r"(at)
                 : "memory");
  } else {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(f.r[0]), "=r"(f.r[1]), "=r"(f.r[2]), "=r"(f.r[3])
                 : "r"(at)
                 : "memory");
  }
  return f;
#endif
}

#ifndef WEFT_CUDA_EMU
#define WEFT_MMA(type)                                                                \
  asm volatile("mma.sync.aligned.m16n8k16.row.col.f32." type "." type                 \
               ".f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, {%0, %1, %2, %3};" \
               : "+f"(c.c[0]), "+f"(c.c[1]), "+f"(c.c[2]), "+f"(c.c[3])               \
               : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[1]))
#endif

// c += a b of values T, sums in fp32.
template <typename T>
__device__ __forceinline__ void MmaM16N8K16(const Fragment4& a, const Fragment2& b,
                                            Accumulator4& c WEFT_WHERE_ARGUMENT) {
  static_assert(std::is_same_v<T, BFloat16> || std::is_same_v<T, Float16>);
#ifdef WEFT_CUDA_EMU
  c = emu_detail::Together<Accumulator4>("mma", where, emu_detail::MmaOperands{a, b, c},
                                         emu_detail::FinishMma<T>);
#else
  if constexpr (std::is_same_v<T, BFloat16>) {
    WEFT_MMA("bf16");
  } else {
    WEFT_MMA("f16");
  }
#endif
}

// Two values of T in a register, the first in its lower half, as fragments hold them.
template <typename T>
__device__ __forceinline__ std::uint32_t PairOf(float first, float second) {
  return std::uint32_t{Narrow<T>(first).bits} | std::uint32_t{Narrow<T>(second).bits} << 16;
}

// Where a tile in shared memory has the 16 bytes `chunk` of `row`, in 16 bytes. Rows are whole
// multiples of 128 bytes; eight rows' chunks of one number are in different banks, so that
// LdMatrixX4() has no conflicts.
template <int kRowBytes>
__device__ __forceinline__ int SwizzledChunk(int row, int chunk) {
  static_assert(kRowBytes % 128 == 0, "chunks are swizzled within 128 bytes");
  return row * (kRowBytes / 16) + (chunk ^ (row & 7));
}

// Copies 16 bytes from global to shared memory behind the thread's back, zeros if not `valid`.
__device__ __forceinline__ void CpAsync16(void* to, const void* from, bool valid) {
#ifdef WEFT_CUDA_EMU
  weft::cuda_emu::CopyAsync(to, from, 16, valid ? 16 : 0);
#else
  const auto at = static_cast<std::uint32_t>(__cvta_generic_to_shared(to));
  const int bytes = valid ? 16 : 0;
  asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(at), "l"(from), "r"(bytes)
               : "memory");
#endif
}

// What this thread copied since the last one is a group.
__device__ __forceinline__ void CpAsyncCommit() {
#ifdef WEFT_CUDA_EMU
  weft::cuda_emu::CopyAsyncCommit();
#else
  asm volatile("cp.async.commit_group;" ::: "memory");
#endif
}

// Waits until all of this thread's groups but the last kInFlight are there.
template <int kInFlight>
__device__ __forceinline__ void CpAsyncWait() {
#ifdef WEFT_CUDA_EMU
  weft::cuda_emu::CopyAsyncWait(kInFlight);
#else
  asm volatile("cp.async.wait_group %0;" ::"n"(kInFlight) : "memory");
#endif
}

}  // namespace weft::kernels::cuda
