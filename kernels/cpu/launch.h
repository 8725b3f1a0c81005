#pragma once

#include <algorithm>
#include <cstdint>

#include "kernels/device/device_stream.h"
#include "kernels/device/stream.h"
#include "kernels/device/thread_pool.h"
#include "server/base/ceil_div.h"
#include "server/base/check.h"

namespace weft::kernels {

inline ThreadPool& PoolOf(Stream& stream) {
  DCHECK(stream.device() == DeviceKind::kCpu);
  return static_cast<CpuStream&>(stream).pool();
}

// Runs body(begin, end) over [0, num_rows) in pieces worth a thread's while: `row_cost` is the
// floats (or the like) a row touches. Rows must be independent.
template <typename Body>
void ParallelRows(ThreadPool& pool, std::int64_t num_rows, std::int64_t row_cost,
                  const Body& body) {
  constexpr std::int64_t kCostPerTask = 16 * 1024;
  const std::int64_t rows_per_task =
      std::max<std::int64_t>(1, kCostPerTask / std::max<std::int64_t>(1, row_cost));
  pool.ParallelFor(CeilDiv(num_rows, rows_per_task), [&](std::int64_t task, int /*thread*/) {
    const std::int64_t begin = task * rows_per_task;
    body(begin, std::min(num_rows, begin + rows_per_task));
  });
}

}  // namespace weft::kernels
