#pragma once

#include <array>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <string>
#include <string_view>
#include <vector>

#include "absl/types/span.h"

namespace weft {

// Names a KV block by everything its content depends on: the model, the tenant's salt, all tokens
// before the block, and its own. SHA-256, whole: who finds a block by its hash reads its KV without
// a further look at the tokens, so that nobody may be able to make two prompts of one hash. It is
// also what processors have instructions for: a block of 128 tokens takes about a microsecond,
// and it is hashed once.
//
// Blocks are `block_size` tokens over the whole DCP group, so that the hashes of groups of one
// model and block size are equal whatever their layouts; routers make the same ones.
using BlockHash = std::array<std::uint8_t, 32>;

// For hash tables: a part of a BlockHash is as good as a hash of it.
struct BlockHashBits {
  std::size_t operator()(const BlockHash& hash) const {
    std::size_t bits;
    std::memcpy(&bits, hash.data(), sizeof(bits));
    return bits;
  }
};

// What the hashes of a group start from; `fingerprint` is the checkpoint's.
std::string BlockHashKey(std::uint64_t fingerprint, std::int32_t block_size);

// The hashes of a sequence: [0] is no block's, it stands for the key and the salt; [1 + i] is that
// of block i. Each is hashed from the one before it and its tokens.
std::vector<BlockHash> StartHashChain(std::string_view key, std::string_view cache_salt);
// Appends the hashes of those full blocks of `token_ids`, the sequence's tokens from its first,
// that are not in `chain` yet. Allocates nothing but to grow `chain`.
void ExtendHashChain(absl::Span<const std::int32_t> token_ids, std::int32_t block_size,
                     std::vector<BlockHash>& chain);

}  // namespace weft
