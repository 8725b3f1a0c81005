#pragma once

#include <cstddef>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/device/device_stream.h"
#include "kernels/device/mirror.h"
#include "kernels/kv_copy.h"
#include "worker/transfer/kv_rows.h"

namespace weft {

// Moves rows between a rank's KV, wherever that is, and messages, which are in the host's memory:
// kv_rows.h for KV in a device's, too, with the same bytes in the messages. One thread.
class KvCopier {
 public:
  // Of KV in the host's memory.
  KvCopier() = default;
  // `device`: whose memory the KV is in, with a stream of this copier's own, which outlives it;
  // null: the host's. Pack() is not given more than `max_bytes`.
  static absl::StatusOr<KvCopier> Create(const KvCacheShape& shape, std::int64_t max_bytes,
                                         kernels::DeviceStream* device);

  // As PackKvRows() and ScatterKvRows(). Errors are the device's.
  absl::StatusOr<std::int64_t> Pack(const KvBlocks& from, const ShardLayout& peer,
                                    KvRowRange& range, absl::Span<std::byte> out);
  absl::Status Scatter(const KvBlocks& to, const ShardLayout& peer, const KvRowRange& range,
                       absl::Span<const std::byte> rows);

 private:
  // Lists a unit of ForEachSharedUnit(), `count` positions from `position` on, whose bytes in the
  // message start at `wire` of wire_.
  void AddUnit(const KvBlocks& blocks, const KvRowRange& range, std::int64_t position,
               std::int32_t count, std::int64_t wire);
  absl::Status Launch(const KvBlocks& blocks, kernels::KvCopyDirection direction);

  kernels::DeviceStream* device_ = nullptr;
  kernels::Mirror<std::byte> wire_;               // [max_bytes]
  kernels::Mirror<kernels::KvSegment> segments_;  // as many as that can have
  std::int32_t num_segments_ = 0;
};

}  // namespace weft
