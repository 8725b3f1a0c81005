#pragma once

#include <array>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"

namespace weft {

// The two neighbours that make `result`. Its rank is its place in the list of merges.
struct BpeMerge {
  std::int32_t left;
  std::int32_t right;
  std::int32_t result;
};

struct BpeSpec {
  std::vector<std::pair<std::string, std::int32_t>> tokens;  // bytes and id; bytes are unique
  std::vector<BpeMerge> merges;                              // a repeated pair: the last one holds
  std::optional<std::int32_t> unknown;  // for bytes that are no token; without it they are dropped
  bool fuse_unknown = false;            // one `unknown` for a run of such bytes
  bool ignore_merges = false;           // a piece that is a token as a whole is not taken apart
};

// Byte pair encoding of one piece: while neighbours have a merge, the one of lowest rank, the
// leftmost of equals, is made. O(n log n) in the bytes of a piece.
//
// Threading: immutable; a Scratch belongs to one thread at a time.
class Bpe {
 public:
  class Scratch {
   private:
    friend class Bpe;
    struct Symbol {
      std::int32_t id;  // kRemoved once merged into its left neighbour
      std::int32_t previous;
      std::int32_t next;  // -1 at either end
    };
    std::vector<Symbol> symbols;
    std::vector<std::uint64_t> queue;  // a heap of rank << 32 | symbol
  };

  explicit Bpe(const BpeSpec& spec);

  // Appends the ids of `piece`, under 2^31 bytes long.
  void Encode(std::string_view piece, Scratch& scratch, std::vector<std::int32_t>& ids) const;

  // The token that is exactly `bytes`.
  std::optional<std::int32_t> Find(std::string_view bytes) const;

 private:
  static constexpr std::int32_t kRemoved = -1;

  void AddSymbols(std::string_view piece, std::vector<Scratch::Symbol>& symbols) const;
  void Merge(Scratch& scratch) const;
  // Queues the merge of `position` and its right neighbour, if there is one.
  void Push(const Scratch::Symbol& left, std::int32_t position, Scratch& scratch) const;
  std::optional<std::uint32_t> FindRank(std::int32_t left, std::int32_t right) const;

  absl::flat_hash_map<std::string, std::int32_t> ids_;
  std::array<std::int32_t, 256> byte_ids_;                   // -1: no token
  absl::flat_hash_map<std::uint64_t, std::uint32_t> ranks_;  // by left << 32 | right
  std::vector<std::int32_t> results_;                        // by rank
  std::optional<std::int32_t> unknown_;
  bool fuse_unknown_;
  bool ignore_merges_;
};

}  // namespace weft
