#pragma once

#include <cstddef>
#include <cstdint>

namespace weft::kernels {

// A token's K or V of one KV head, and where it is in a message between groups.
struct KvSegment {
  std::int64_t place;        // bytes from KvCopyParams::kv on: values beside each other
  std::int32_t wire;         // bytes from KvCopyParams::wire on
  std::int32_t count;        // values
  std::int32_t wire_stride;  // values from one to the next there
  std::int32_t padding = 0;
};

enum class KvCopyDirection : std::uint8_t { kGather, kScatter };

// Gathers KV into a message, or scatters a message into KV; of devices, DeviceStream::KvCopy(). No
// two segments overlap. On the CPU: worker/transfer/kv_rows.h.
struct KvCopyParams {
  const KvSegment* segments;  // [num_segments]
  std::byte* kv;
  std::byte* wire;
  std::int32_t num_segments;
  std::int32_t value_bytes;  // 2 or 4; all offsets are multiples of it
  KvCopyDirection direction;
};

}  // namespace weft::kernels
