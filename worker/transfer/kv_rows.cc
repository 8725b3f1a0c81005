#include "worker/transfer/kv_rows.h"

#include <cstring>

#include "kernels/attention.h"
#include "server/base/check.h"
#include "worker/transfer/kv_routes.h"

namespace weft {
namespace {

// Where one head's K and V of a block are.
struct BlockPlanes {
  std::byte* k;
  std::byte* v;  // null for a latent
};

class Planes {
 public:
  Planes(const KvBlocks& blocks, const KvRowRange& range)
      : blocks_(blocks),
        first_head_(blocks.layout.GroupKvHeads().begin),
        num_heads_(blocks.cache.shape().num_kv_heads),
        k_bytes_(Bytes(blocks.cache.shape().head_dim)),
        v_bytes_(Bytes(blocks.cache.shape().value_dim)),
        k_(static_cast<std::byte*>(blocks.cache.k_blocks(range.layer))),
        v_(static_cast<std::byte*>(blocks.cache.v_blocks(range.layer))) {}

  BlockPlanes At(std::int64_t position, std::int32_t head) const {
    const std::int64_t block = blocks_.table[blocks_.layout.BlockIndex(position)];
    const std::int64_t plane = block * num_heads_ + (head - first_head_);
    return {k_ + plane * k_bytes_, v_ == nullptr ? nullptr : v_ + plane * v_bytes_};
  }

 private:
  // Of a block and head.
  std::int64_t Bytes(std::int32_t dim) const {
    const KvCacheShape& shape = blocks_.cache.shape();
    return std::int64_t{shape.block_tokens_per_rank} * dim * DTypeBytes(shape.dtype);
  }

  const KvBlocks& blocks_;
  const std::int32_t first_head_;
  const std::int64_t num_heads_;
  const std::int64_t k_bytes_;
  const std::int64_t v_bytes_;
  std::byte* const k_;
  std::byte* const v_;
};

// Copies one unit of one head between its place and `wire`, which it advances.
template <bool kPack, typename Element, typename Wire>
void CopyUnit(const KvCacheShape& shape, const BlockPlanes& planes, std::int32_t token,
              std::int32_t count, Wire*& wire) {
  const auto copy = [&wire](std::byte* place, std::size_t bytes) {
    if constexpr (kPack) {
      std::memcpy(wire, place, bytes);
    } else {
      std::memcpy(place, wire, bytes);
    }
    wire += bytes;
  };
  const std::int32_t block_tokens = shape.block_tokens_per_rank;
  auto* const k = reinterpret_cast<Element*>(planes.k);
  if (count == kKvTile) {
    copy(planes.k + kernels::KIndex(token, 0, shape.head_dim, block_tokens) * sizeof(Element),
         std::size_t{kKvTile} * shape.head_dim * sizeof(Element));
  } else {
    Element* const first = k + kernels::KIndex(token, 0, shape.head_dim, block_tokens);
    const std::int64_t stride =
        kernels::KIndex(token, 1, shape.head_dim, block_tokens) - (first - k);
    for (std::int32_t d = 0; d < shape.head_dim; ++d) {
      if constexpr (kPack) {
        std::memcpy(wire + d * sizeof(Element), first + d * stride, sizeof(Element));
      } else {
        std::memcpy(first + d * stride, wire + d * sizeof(Element), sizeof(Element));
      }
    }
    wire += shape.head_dim * sizeof(Element);
  }
  if (planes.v != nullptr) {
    copy(planes.v + kernels::VIndex(token, 0, shape.value_dim) * sizeof(Element),
         std::size_t{static_cast<std::size_t>(count)} * shape.value_dim * sizeof(Element));
  }
}

template <bool kPack, typename Wire>
void CopyHeads(const KvBlocks& blocks, const Planes& planes, const IndexRange& heads,
               std::int64_t position, std::int32_t count, Wire*& wire) {
  const KvCacheShape& shape = blocks.cache.shape();
  const std::int32_t token = blocks.layout.OffsetInBlock(position);
  for (std::int32_t head = heads.begin; head < heads.end; ++head) {
    const BlockPlanes at = planes.At(position, head);
    if (DTypeBytes(shape.dtype) == 2) {
      CopyUnit<kPack, std::uint16_t>(shape, at, token, count, wire);
    } else {
      CopyUnit<kPack, std::uint32_t>(shape, at, token, count, wire);
    }
  }
}

}  // namespace

std::int64_t KvRowBytes(const KvCacheShape& shape, std::int32_t num_heads) {
  return std::int64_t{num_heads} * (shape.head_dim + shape.value_dim) * DTypeBytes(shape.dtype);
}

std::int64_t CountKvRows(const ShardLayout& a, const ShardLayout& b, std::int64_t first,
                         std::int64_t end) {
  std::int64_t rows = 0;
  ForEachSharedUnit(a, b, first, end, [&rows](std::int64_t, std::int32_t count) {
    rows += count;
    return true;
  });
  return rows;
}

std::int64_t PackKvRows(const KvBlocks& from, const ShardLayout& peer, KvRowRange& range,
                        absl::Span<std::byte> out) {
  const Planes planes(from, range);
  const std::int64_t row_bytes = KvRowBytes(from.cache.shape(), range.heads.size());
  std::byte* wire = out.data();
  const std::byte* const end = out.data() + out.size();
  std::int64_t stopped = range.end_position;
  ForEachSharedUnit(from.layout, peer, range.first_position, range.end_position,
                    [&](std::int64_t position, std::int32_t count) {
                      if (end - wire < count * row_bytes) {
                        stopped = position;
                        return false;
                      }
                      CopyHeads<true>(from, planes, range.heads, position, count, wire);
                      return true;
                    });
  range.end_position = stopped;
  return wire - out.data();
}

void ScatterKvRows(const KvBlocks& to, const ShardLayout& peer, const KvRowRange& range,
                   absl::Span<const std::byte> rows) {
  const Planes planes(to, range);
  const std::byte* wire = rows.data();
  ForEachSharedUnit(peer, to.layout, range.first_position, range.end_position,
                    [&](std::int64_t position, std::int32_t count) {
                      CopyHeads<false>(to, planes, range.heads, position, count, wire);
                      return true;
                    });
  CHECK(wire == rows.data() + rows.size());
}

}  // namespace weft
