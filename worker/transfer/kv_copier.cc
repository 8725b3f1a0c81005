#include "worker/transfer/kv_copier.h"

#include <algorithm>
#include <cstring>

#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "worker/transfer/kv_routes.h"

namespace weft {

absl::StatusOr<KvCopier> KvCopier::Create(const KvCacheShape& shape, std::int64_t max_bytes,
                                          kernels::DeviceStream* device) {
  KvCopier copier;
  copier.device_ = device;
  if (device == nullptr) return copier;
  const std::int32_t least =
      shape.value_dim > 0 ? std::min(shape.head_dim, shape.value_dim) : shape.head_dim;
  ASSIGN_OR_RETURN(copier.wire_, kernels::Mirror<std::byte>::Create(max_bytes, *device));
  ASSIGN_OR_RETURN(copier.segments_, kernels::Mirror<kernels::KvSegment>::Create(
                                         max_bytes / (least * DTypeBytes(shape.dtype)), *device));
  return copier;
}

// What kv_rows.h says of a message: rows one after the other, in each the heads, of each K and then
// V; of a whole tile head by head, with K as [head_dim][16 tokens].
void KvCopier::AddUnit(const KvBlocks& blocks, const KvRowRange& range, std::int64_t position,
                       std::int32_t count, std::int64_t wire) {
  const KvCacheShape& shape = blocks.cache.shape();
  const std::int64_t size = DTypeBytes(shape.dtype);
  const std::int64_t tokens = shape.block_tokens_per_rank;
  auto* const first = static_cast<std::byte*>(blocks.cache.k_blocks(0));
  const auto* k = static_cast<const std::byte*>(blocks.cache.k_blocks(range.layer));
  const auto* v = static_cast<const std::byte*>(blocks.cache.v_blocks(range.layer));
  const std::int64_t block = blocks.table[blocks.layout.BlockIndex(position)];
  const std::int32_t token = blocks.layout.OffsetInBlock(position);
  const std::int32_t first_head = blocks.layout.GroupKvHeads().begin;
  const auto add = [&](const std::byte* plane, std::int64_t row, std::int32_t dim, std::int64_t at,
                       std::int32_t stride) {
    segments_.host()[num_segments_++] = {.place = plane + row * dim * size - first,
                                         .wire = static_cast<std::int32_t>(at),
                                         .count = dim,
                                         .wire_stride = stride};
  };
  for (std::int32_t head = range.heads.begin; head < range.heads.end; ++head) {
    const std::int64_t row = (block * shape.num_kv_heads + head - first_head) * tokens + token;
    for (std::int32_t i = 0; i < count; ++i) {
      add(k, row + i, shape.head_dim, wire + i * size, count);
    }
    wire += count * shape.head_dim * size;
    if (v == nullptr) continue;
    for (std::int32_t i = 0; i < count; ++i) {
      add(v, row + i, shape.value_dim, wire + i * shape.value_dim * size, 1);
    }
    wire += count * shape.value_dim * size;
  }
}

absl::Status KvCopier::Launch(const KvBlocks& blocks, kernels::KvCopyDirection direction) {
  RETURN_IF_ERROR(segments_.Send(num_segments_, *device_));
  return device_->KvCopy(
      {.segments = segments_.data(),
       .kv = static_cast<std::byte*>(blocks.cache.k_blocks(0)),
       .wire = wire_.data(),
       .num_segments = num_segments_,
       .value_bytes = static_cast<std::int32_t>(DTypeBytes(blocks.cache.shape().dtype)),
       .direction = direction});
}

absl::StatusOr<std::int64_t> KvCopier::Pack(const KvBlocks& from, const ShardLayout& peer,
                                            KvRowRange& range, absl::Span<std::byte> out) {
  if (device_ == nullptr) return PackKvRows(from, peer, range, out);
  CHECK(static_cast<std::int64_t>(out.size()) <= wire_.size_bytes());
  const std::int64_t row_bytes = KvRowBytes(from.cache.shape(), range.heads.size());
  std::int64_t bytes = 0;
  std::int64_t stopped = range.end_position;
  num_segments_ = 0;
  ForEachSharedUnit(from.layout, peer, range.first_position, range.end_position,
                    [&](std::int64_t position, std::int32_t count) {
                      if (bytes + count * row_bytes > static_cast<std::int64_t>(out.size())) {
                        stopped = position;
                        return false;
                      }
                      AddUnit(from, range, position, count, bytes);
                      bytes += count * row_bytes;
                      return true;
                    });
  range.end_position = stopped;
  if (bytes == 0) return bytes;
  RETURN_IF_ERROR(Launch(from, kernels::KvCopyDirection::kGather));
  RETURN_IF_ERROR(wire_.Fetch(bytes, *device_));
  RETURN_IF_ERROR(device_->Synchronize());
  std::memcpy(out.data(), wire_.host(), static_cast<std::size_t>(bytes));
  return bytes;
}

absl::Status KvCopier::Scatter(const KvBlocks& to, const ShardLayout& peer, const KvRowRange& range,
                               absl::Span<const std::byte> rows) {
  if (device_ == nullptr) {
    ScatterKvRows(to, peer, range, rows);
    return absl::OkStatus();
  }
  const std::int64_t row_bytes = KvRowBytes(to.cache.shape(), range.heads.size());
  // A peer may put more in a message than we do: in parts.
  std::int64_t done = 0;
  std::int64_t bytes = 0;  // listed, behind those
  const auto store = [&]() -> absl::Status {
    if (bytes == 0) return absl::OkStatus();
    RETURN_IF_ERROR(wire_.Send(rows.subspan(done, bytes), *device_));
    RETURN_IF_ERROR(Launch(to, kernels::KvCopyDirection::kScatter));
    RETURN_IF_ERROR(device_->Synchronize());
    done += bytes;
    bytes = num_segments_ = 0;
    return absl::OkStatus();
  };
  absl::Status status;
  num_segments_ = 0;
  ForEachSharedUnit(peer, to.layout, range.first_position, range.end_position,
                    [&](std::int64_t position, std::int32_t count) {
                      if (bytes + count * row_bytes > wire_.size_bytes()) status = store();
                      if (!status.ok()) return false;
                      AddUnit(to, range, position, count, bytes);
                      bytes += count * row_bytes;
                      return true;
                    });
  RETURN_IF_ERROR(status);
  RETURN_IF_ERROR(store());
  CHECK(done == static_cast<std::int64_t>(rows.size()));
  return absl::OkStatus();
}

}  // namespace weft
