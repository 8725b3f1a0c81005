#include "worker/transfer/kv_rows.h"

#include <cstring>
#include <type_traits>

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

// Four by four values of 16 bits, in rows that are so many bytes apart.
inline void Transpose(const std::byte* from, std::int64_t from_stride, std::byte* to,
                      std::int64_t to_stride) {
  constexpr std::uint64_t kEven = 0x0000ffff0000ffff, kLow = 0x00000000ffffffff;
  std::uint64_t a, b, c, d;
  std::memcpy(&a, from, 8);
  std::memcpy(&b, from + from_stride, 8);
  std::memcpy(&c, from + 2 * from_stride, 8);
  std::memcpy(&d, from + 3 * from_stride, 8);
  const std::uint64_t ab0 = (a & kEven) | (b & kEven) << 16;
  const std::uint64_t ab1 = (a >> 16 & kEven) | (b & ~kEven);
  const std::uint64_t cd0 = (c & kEven) | (d & kEven) << 16;
  const std::uint64_t cd1 = (c >> 16 & kEven) | (d & ~kEven);
  a = (ab0 & kLow) | cd0 << 32;
  b = (ab1 & kLow) | cd1 << 32;
  c = ab0 >> 32 | (cd0 & ~kLow);
  d = ab1 >> 32 | (cd1 & ~kLow);
  std::memcpy(to, &a, 8);
  std::memcpy(to + to_stride, &b, 8);
  std::memcpy(to + 2 * to_stride, &c, 8);
  std::memcpy(to + 3 * to_stride, &d, 8);
}

constexpr std::int64_t kMaxRowBytes = 2 * kernels::kMaxLatentDim;

// Copies units between their places and `wire`, in the order they are given. Rows of one tile of K
// are copied together, head by head: one after the other, each would touch all of the tile.
template <bool kPack, typename Element>
class UnitCopier {
 public:
  using Wire = std::conditional_t<kPack, std::byte, const std::byte>;

  UnitCopier(const KvBlocks& blocks, const KvRowRange& range, Wire* wire)
      : blocks_(blocks),
        shape_(blocks.cache.shape()),
        planes_(blocks, range),
        heads_(range.heads),
        row_bytes_(KvRowBytes(shape_, range.heads.size())),
        wire_(wire) {}

  void Copy(std::int64_t position, std::int32_t count) {
    const std::int32_t token = blocks_.layout.OffsetInBlock(position);
    if (count == kKvTile) {
      Flush();
      CopyTile(position, token);
    } else {
      const std::int64_t block = blocks_.layout.BlockIndex(position);
      if (num_rows_ > 0 && (block != block_ || token / kKvTile != tokens_[0] / kKvTile)) Flush();
      if (num_rows_ == 0) {
        first_position_ = position;
        block_ = block;
      }
      tokens_[num_rows_++] = token;
    }
  }

  // Where the wire is when all is copied.
  Wire* End() {
    Flush();
    return wire_;
  }
  std::int64_t BytesUntil(const std::byte* end) const {
    return end - wire_ - num_rows_ * row_bytes_;
  }

 private:
  static void CopyBytes(Wire* wire, std::byte* place, std::size_t bytes) {
    if constexpr (kPack) {
      std::memcpy(wire, place, bytes);
    } else {
      std::memcpy(place, wire, bytes);
    }
  }

  void CopyTile(std::int64_t position, std::int32_t token) {
    const std::size_t k_bytes = std::size_t{kKvTile} * shape_.head_dim * sizeof(Element);
    const std::size_t v_bytes = std::size_t{kKvTile} * shape_.value_dim * sizeof(Element);
    for (std::int32_t head = heads_.begin; head < heads_.end; ++head) {
      const BlockPlanes at = planes_.At(position, head);
      CopyBytes(wire_, at.k + KOffset(token), k_bytes);
      wire_ += k_bytes;
      if (at.v == nullptr) continue;
      CopyBytes(wire_, at.v + VOffset(token), v_bytes);
      wire_ += v_bytes;
    }
  }

  void Flush() {
    if (num_rows_ == 0) return;
    Wire* head_wire = wire_;
    for (std::int32_t head = heads_.begin; head < heads_.end; ++head) {
      const BlockPlanes at = planes_.At(first_position_, head);
      CopyK(at.k, head_wire);
      head_wire += shape_.head_dim * sizeof(Element);
      if (at.v == nullptr) continue;
      const std::size_t v_bytes = shape_.value_dim * sizeof(Element);
      for (std::int32_t row = 0; row < num_rows_; ++row) {
        CopyBytes(head_wire + row * row_bytes_, at.v + VOffset(tokens_[row]), v_bytes);
      }
      head_wire += v_bytes;
    }
    wire_ += num_rows_ * row_bytes_;
    num_rows_ = 0;
  }

  // K of the rows that are to be copied: four tokens and four dims at a time where tokens are
  // beside each other, by way of rows on the stack.
  void CopyK(std::byte* plane, Wire* wire) const {
    constexpr auto kSize = static_cast<std::int64_t>(sizeof(Element));
    const std::int64_t stride =
        kSize * (kernels::KIndex(tokens_[0], 1, shape_.head_dim, BlockTokens()) -
                 kernels::KIndex(tokens_[0], 0, shape_.head_dim, BlockTokens()));
    const std::int64_t bytes = kSize * shape_.head_dim;
    const bool whole = kSize == 2 && stride % 8 == 0 && bytes % 8 == 0 && bytes <= kMaxRowBytes;
    std::byte rows[kKvTile * kMaxRowBytes];  // those of quads, one after the other
    std::byte* quads[4];                     // where they are in the tile
    std::int32_t num_quads = 0;
    std::byte* row_at[kKvTile];
    for (std::int32_t row = 0, next = 0; row < num_rows_; row = next) {
      while (next < num_rows_ && tokens_[next] / 4 == tokens_[row] / 4) ++next;
      const bool quad = whole && next - row >= (kPack ? 2 : 4);
      for (std::int32_t one = row; one < next; ++one) {
        row_at[one] = quad ? rows + (4 * num_quads + tokens_[one] % 4) * bytes : nullptr;
        if (!quad) CopyOne(plane + KOffset(tokens_[one]), stride, wire + one * row_bytes_);
      }
      if (quad) quads[num_quads++] = plane + KOffset(tokens_[row] / 4 * 4);
    }
    if constexpr (!kPack) {
      for (std::int32_t row = 0; row < num_rows_; ++row) {
        if (row_at[row] != nullptr) std::memcpy(row_at[row], wire + row * row_bytes_, bytes);
      }
    }
    for (std::int64_t at = 0; num_quads > 0 && at < bytes; at += 8) {
      for (std::int32_t i = 0; i < num_quads; ++i) {
        std::byte* const place = quads[i] + at / kSize * stride;
        std::byte* const four_rows = rows + 4 * i * bytes + at;
        if constexpr (kPack) {
          Transpose(place, stride, four_rows, bytes);
        } else {
          Transpose(four_rows, bytes, place, stride);
        }
      }
    }
    if constexpr (kPack) {
      for (std::int32_t row = 0; row < num_rows_; ++row) {
        if (row_at[row] != nullptr) std::memcpy(wire + row * row_bytes_, row_at[row], bytes);
      }
    }
  }

  void CopyOne(std::byte* place, std::int64_t stride, Wire* wire) const {
    Wire* const end = wire + shape_.head_dim * sizeof(Element);
    for (; wire < end; wire += sizeof(Element), place += stride) {
      CopyBytes(wire, place, sizeof(Element));
    }
  }

  std::int32_t BlockTokens() const { return shape_.block_tokens_per_rank; }
  std::size_t KOffset(std::int32_t token) const {
    return kernels::KIndex(token, 0, shape_.head_dim, BlockTokens()) * sizeof(Element);
  }
  std::size_t VOffset(std::int32_t token) const {
    return kernels::VIndex(token, 0, shape_.value_dim) * sizeof(Element);
  }

  const KvBlocks& blocks_;
  const KvCacheShape& shape_;
  const Planes planes_;
  const IndexRange heads_;
  const std::int64_t row_bytes_;
  Wire* wire_;
  // Rows that are still to be copied, of one tile.
  std::int32_t num_rows_ = 0;
  std::int32_t tokens_[kKvTile];
  std::int64_t first_position_ = 0;
  std::int64_t block_ = 0;
};

template <typename Element>
std::int64_t Pack(const KvBlocks& from, const ShardLayout& peer, KvRowRange& range,
                  absl::Span<std::byte> out) {
  UnitCopier<true, Element> copier(from, range, out.data());
  const std::int64_t row_bytes = KvRowBytes(from.cache.shape(), range.heads.size());
  std::int64_t stopped = range.end_position;
  ForEachSharedUnit(from.layout, peer, range.first_position, range.end_position,
                    [&](std::int64_t position, std::int32_t count) {
                      if (copier.BytesUntil(out.data() + out.size()) < count * row_bytes) {
                        stopped = position;
                        return false;
                      }
                      copier.Copy(position, count);
                      return true;
                    });
  range.end_position = stopped;
  return copier.End() - out.data();
}

template <typename Element>
void Scatter(const KvBlocks& to, const ShardLayout& peer, const KvRowRange& range,
             absl::Span<const std::byte> rows) {
  UnitCopier<false, Element> copier(to, range, rows.data());
  ForEachSharedUnit(peer, to.layout, range.first_position, range.end_position,
                    [&](std::int64_t position, std::int32_t count) {
                      copier.Copy(position, count);
                      return true;
                    });
  CHECK(copier.End() == rows.data() + rows.size());
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
  return DTypeBytes(from.cache.shape().dtype) == 2 ? Pack<std::uint16_t>(from, peer, range, out)
                                                   : Pack<std::uint32_t>(from, peer, range, out);
}

void ScatterKvRows(const KvBlocks& to, const ShardLayout& peer, const KvRowRange& range,
                   absl::Span<const std::byte> rows) {
  if (DTypeBytes(to.cache.shape().dtype) == 2) {
    Scatter<std::uint16_t>(to, peer, range, rows);
  } else {
    Scatter<std::uint32_t>(to, peer, range, rows);
  }
}

}  // namespace weft
