#pragma once

#include <bit>
#include <cstdint>
#include <cstring>
#include <random>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "kernels/attention.h"
#include "worker/transfer/kv_rank.h"
#include "worker/transfer/kv_routes.h"

namespace weft {

// The KV of a group over one sequence, in which every element says where it belongs.
class KvGroup {
 public:
  KvGroup(const LayoutOptions& options, const HeadCounts& heads, const KvCacheShape& shape,
          std::int64_t max_len, std::mt19937& random)
      : heads_(heads) {
    absl::StatusOr<std::vector<ShardLayout>> made = LayoutsOfGroup(options, heads);
    EXPECT_TRUE(made.ok()) << made.status();
    layouts = *std::move(made);
    options_ = options;
    options_.block_size = layouts[0].block_size();
    options_.interleave = layouts[0].interleave();
    const auto num_blocks = static_cast<std::int32_t>((max_len + layouts[0].block_size() - 1) /
                                                      layouts[0].block_size());
    for (std::int32_t i = 0; i < num_blocks + 2; ++i) table.push_back(i);
    std::shuffle(table.begin(), table.end(), random);
    for (const ShardLayout& layout : layouts) {
      KvCacheShape own = shape;
      own.num_kv_heads = layout.GroupKvHeads().size();
      own.block_tokens_per_rank = layout.block_tokens_per_rank();
      kernels::CpuStream cpu(1);
      absl::StatusOr<KvCache> cache = KvCache::Create(own, num_blocks + 2, cpu);
      EXPECT_TRUE(cache.ok()) << cache.status();
      caches.push_back(*std::move(cache));
    }
  }

  // Writes what belongs there.
  void Fill(std::int64_t first, std::int64_t end) {
    for (std::int32_t layer = 0; layer < caches[0].shape().num_layers; ++layer) {
      FillLayer(layer, first, end);
    }
  }
  void FillLayer(std::int32_t layer, std::int64_t first, std::int64_t end) {
    ForEach(layer, first, end, [](std::byte* at, std::uint32_t value, std::size_t bytes) {
      std::memcpy(at, &value, bytes);
    });
  }
  // How many elements in [first, end) are not what belongs there (or not 0, with `empty`).
  std::int64_t CountWrong(std::int64_t first, std::int64_t end, bool empty = false) {
    std::int64_t wrong = 0;
    for (std::int32_t layer = 0; layer < caches[0].shape().num_layers; ++layer) {
      ForEach(layer, first, end, [&](std::byte* at, std::uint32_t value, std::size_t bytes) {
        std::uint32_t seen = 0;
        std::memcpy(&seen, at, bytes);
        wrong += seen != (empty ? 0 : value);
      });
    }
    return wrong;
  }

  KvRank Rank(std::int32_t rank, std::string format = "kv") const {
    return {.cache = &caches[rank],
            .group = layouts,
            .rank = rank,
            .layout = options_,
            .heads = heads_,
            .format = std::move(format)};
  }

  std::vector<ShardLayout> layouts;
  std::vector<KvCache> caches;
  std::vector<std::int32_t> table;

 private:
  // element(address, value, bytes) of every element of positions [first, end) that a rank owns.
  template <typename Element>
  void ForEach(std::int32_t layer, std::int64_t first, std::int64_t end, Element&& element) {
    for (std::size_t r = 0; r < layouts.size(); ++r) {
      const KvCacheShape& shape = caches[r].shape();
      const auto bytes = static_cast<std::size_t>(DTypeBytes(shape.dtype));
      const std::int32_t block_tokens = shape.block_tokens_per_rank;
      const IndexRange held = layouts[r].GroupKvHeads();
      for (std::int64_t p = first; p < end; ++p) {
        if (!layouts[r].Owns(p)) continue;
        const std::int64_t block = table[layouts[r].BlockIndex(p)];
        const std::int32_t token = layouts[r].OffsetInBlock(p);
        for (std::int32_t h = held.begin; h < held.end; ++h) {
          const std::int64_t plane = (block * held.size() + h - held.begin) * block_tokens;
          for (const bool is_k : {true, false}) {
            const std::int32_t dim = is_k ? shape.head_dim : shape.value_dim;
            auto* const base = static_cast<std::byte*>(is_k ? caches[r].k_blocks(layer)
                                                            : caches[r].v_blocks(layer));
            for (std::int32_t d = 0; d < dim; ++d) {
              const std::int64_t at =
                  plane * dim + (is_k ? kernels::KIndex(token, d, dim, block_tokens)
                                      : kernels::VIndex(token, d, dim));
              std::uint32_t value = static_cast<std::uint32_t>(((p * 131 + h) * 61 + layer) * 509 +
                                                               d * 2 + (is_k ? 1 : 0) + 1);
              if (bytes == 2) value = value % 65521 + 1;
              element(base + at * bytes, value, bytes);
            }
          }
        }
      }
    }
  }

  LayoutOptions options_;
  HeadCounts heads_;
};

// A layout of up to 8 ranks that `heads` allow.
inline LayoutOptions DrawLayout(std::mt19937& random, const HeadCounts& heads) {
  const auto draw = [&random](int from, int to) {
    return std::uniform_int_distribution<int>(from, to)(random);
  };
  LayoutOptions options;
  options.tensor_parallel_size = draw(1, std::min(8, heads.num_q_heads));
  do {
    options.decode_context_parallel_size = draw(1, options.tensor_parallel_size);
  } while (options.tensor_parallel_size % options.decode_context_parallel_size != 0);
  const int interleaves[] = {1, 2, 3, 4, 8, 16, 32};
  options.interleave = interleaves[draw(0, 6)];
  options.block_size = options.decode_context_parallel_size * *options.interleave * draw(1, 3);
  return options;
}

inline std::string Describe(const LayoutOptions& layout) {
  return fmt::format("T={} N={} V={} I={}", layout.tensor_parallel_size,
                     layout.decode_context_parallel_size, *layout.block_size, *layout.interleave);
}

}  // namespace weft
