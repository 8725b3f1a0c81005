#include "router/text/bpe.h"

#include <algorithm>
#include <functional>

namespace weft {
namespace {

std::uint64_t PairKey(std::int32_t left, std::int32_t right) {
  return static_cast<std::uint64_t>(static_cast<std::uint32_t>(left)) << 32 |
         static_cast<std::uint32_t>(right);
}

}  // namespace

Bpe::Bpe(const BpeSpec& spec)
    : unknown_(spec.unknown), fuse_unknown_(spec.fuse_unknown), ignore_merges_(spec.ignore_merges) {
  byte_ids_.fill(-1);
  ids_.reserve(spec.tokens.size());
  for (const auto& [bytes, id] : spec.tokens) {
    ids_.emplace(bytes, id);
    if (bytes.size() == 1) byte_ids_[static_cast<std::uint8_t>(bytes[0])] = id;
  }
  ranks_.reserve(spec.merges.size());
  results_.reserve(spec.merges.size());
  for (const BpeMerge& merge : spec.merges) {
    ranks_[PairKey(merge.left, merge.right)] = static_cast<std::uint32_t>(results_.size());
    results_.push_back(merge.result);
  }
}

void Bpe::Encode(std::string_view piece, Scratch& scratch, std::vector<std::int32_t>& ids) const {
  if (ignore_merges_) {
    if (const std::optional<std::int32_t> id = Find(piece)) {
      ids.push_back(*id);
      return;
    }
  }
  AddSymbols(piece, scratch.symbols);
  Merge(scratch);
  for (const Scratch::Symbol& symbol : scratch.symbols) {
    if (symbol.id != kRemoved) ids.push_back(symbol.id);
  }
}

std::optional<std::int32_t> Bpe::Find(std::string_view bytes) const {
  const auto found = ids_.find(absl::string_view(bytes.data(), bytes.size()));
  if (found == ids_.end()) return std::nullopt;
  return found->second;
}

void Bpe::AddSymbols(std::string_view piece, std::vector<Scratch::Symbol>& symbols) const {
  symbols.clear();
  bool after_unknown = false;
  for (const char byte : piece) {
    std::int32_t id = byte_ids_[static_cast<std::uint8_t>(byte)];
    const bool is_unknown = id < 0;
    if (is_unknown) {
      if (!unknown_ || (fuse_unknown_ && after_unknown)) continue;
      id = *unknown_;
    }
    after_unknown = is_unknown;
    const auto position = static_cast<std::int32_t>(symbols.size());
    symbols.push_back({.id = id, .previous = position - 1, .next = position + 1});
  }
  if (!symbols.empty()) symbols.back().next = -1;
}

void Bpe::Merge(Scratch& scratch) const {
  std::vector<Scratch::Symbol>& symbols = scratch.symbols;
  scratch.queue.clear();
  for (std::size_t i = 0; i < symbols.size(); ++i) {
    Push(symbols[i], static_cast<std::int32_t>(i), scratch);
  }
  while (!scratch.queue.empty()) {
    std::pop_heap(scratch.queue.begin(), scratch.queue.end(), std::greater<>());
    const std::uint64_t top = scratch.queue.back();
    scratch.queue.pop_back();
    const auto position = static_cast<std::int32_t>(top & 0xFFFFFFFF);
    const std::int32_t result = results_[top >> 32];
    Scratch::Symbol& left = symbols[position];
    if (left.id == kRemoved || left.next < 0) continue;
    // The entry is stale unless the neighbours still make the same token; that it may be from
    // another pair than the one queued is how Hugging Face does it.
    Scratch::Symbol& right = symbols[left.next];
    const std::optional<std::uint32_t> rank = FindRank(left.id, right.id);
    if (!rank || results_[*rank] != result) continue;

    left.id = result;
    left.next = right.next;
    right.id = kRemoved;
    if (left.next >= 0) symbols[left.next].previous = position;
    if (left.previous >= 0) Push(symbols[left.previous], left.previous, scratch);
    Push(left, position, scratch);
  }
}

void Bpe::Push(const Scratch::Symbol& left, std::int32_t position, Scratch& scratch) const {
  if (left.next < 0) return;
  const std::optional<std::uint32_t> rank = FindRank(left.id, scratch.symbols[left.next].id);
  if (!rank) return;
  scratch.queue.push_back(static_cast<std::uint64_t>(*rank) << 32 |
                          static_cast<std::uint32_t>(position));
  std::push_heap(scratch.queue.begin(), scratch.queue.end(), std::greater<>());
}

std::optional<std::uint32_t> Bpe::FindRank(std::int32_t left, std::int32_t right) const {
  const auto found = ranks_.find(PairKey(left, right));
  if (found == ranks_.end()) return std::nullopt;
  return found->second;
}

}  // namespace weft
