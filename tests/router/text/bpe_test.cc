#include "router/text/bpe.h"

#include <algorithm>
#include <map>
#include <random>

#include "gtest/gtest.h"

namespace weft {
namespace {

// The definition, step by step: merge the leftmost pair of lowest rank until there is none.
std::vector<std::int32_t> MergeNaively(const BpeSpec& spec, const std::string& piece) {
  std::map<std::string, std::int32_t> ids(spec.tokens.begin(), spec.tokens.end());
  std::vector<std::int32_t> symbols;
  for (const char byte : piece) symbols.push_back(ids.at(std::string(1, byte)));
  while (true) {
    std::size_t best_rank = spec.merges.size();
    std::size_t best_position = 0;
    for (std::size_t i = 0; i + 1 < symbols.size(); ++i) {
      for (std::size_t rank = 0; rank < best_rank; ++rank) {
        const BpeMerge& merge = spec.merges[rank];
        if (merge.left != symbols[i] || merge.right != symbols[i + 1]) continue;
        best_rank = rank;
        best_position = i;
      }
    }
    if (best_rank == spec.merges.size()) return symbols;
    symbols[best_position] = spec.merges[best_rank].result;
    symbols.erase(symbols.begin() + static_cast<std::ptrdiff_t>(best_position) + 1);
  }
}

// Over the letters a..d, with merges of tokens drawn at random, each making a new token.
BpeSpec RandomSpec(std::mt19937& random, int num_merges) {
  BpeSpec spec;
  for (int i = 0; i < 4; ++i) spec.tokens.emplace_back(std::string(1, 'a' + i), i);
  std::map<std::string, std::int32_t> known(spec.tokens.begin(), spec.tokens.end());
  while (static_cast<int>(spec.merges.size()) < num_merges) {
    const auto [left, left_id] = spec.tokens[random() % spec.tokens.size()];
    const auto [right, right_id] = spec.tokens[random() % spec.tokens.size()];
    const auto id = static_cast<std::int32_t>(spec.tokens.size());
    if (left.size() + right.size() > 12 || !known.emplace(left + right, id).second) continue;
    spec.tokens.emplace_back(left + right, id);
    spec.merges.push_back({.left = left_id, .right = right_id, .result = id});
  }
  return spec;
}

std::vector<std::int32_t> Encode(const Bpe& bpe, std::string_view piece) {
  Bpe::Scratch scratch;
  std::vector<std::int32_t> ids;
  bpe.Encode(piece, scratch, ids);
  return ids;
}

TEST(BpeTest, MergesAsTheDefinitionSays) {
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    const BpeSpec spec = RandomSpec(random, 1 + seed % 30);
    const Bpe bpe(spec);
    for (int i = 0; i < 20; ++i) {
      std::string piece(random() % 60, 'a');
      for (char& c : piece) c = static_cast<char>('a' + random() % (1 + i % 4));
      ASSERT_EQ(Encode(bpe, piece), MergeNaively(spec, piece)) << "seed " << seed << ": " << piece;
    }
  }
}

// a, aa, aaaa, ... each made of two halves.
BpeSpec Doubling(int num_doublings) {
  BpeSpec spec;
  spec.tokens.emplace_back("a", 0);
  for (int i = 0; i < num_doublings; ++i) {
    spec.tokens.emplace_back(std::string(std::size_t{2} << i, 'a'), i + 1);
    spec.merges.push_back({.left = i, .right = i, .result = i + 1});
  }
  return spec;
}

// Quadratic time would be half an hour: the test's time limit is the check.
TEST(BpeTest, APieceOfAMebibyteIsEncodedInNearLinearTime) {
  const Bpe bpe(Doubling(4));
  const std::vector<std::int32_t> ids = Encode(bpe, std::string((1 << 20) + 5, 'a'));
  ASSERT_EQ(ids.size(), (1U << 20) / 16 + 2);
  EXPECT_TRUE(std::all_of(ids.begin(), ids.end() - 2, [](std::int32_t id) { return id == 4; }));
  EXPECT_EQ(ids[ids.size() - 2], 2);
  EXPECT_EQ(ids.back(), 0);
}

TEST(BpeTest, BytesWithoutATokenAreDroppedUnlessThereIsAnUnknownToken) {
  BpeSpec spec = Doubling(1);
  EXPECT_EQ(Encode(Bpe(spec), "axxay"), (std::vector<std::int32_t>{1}));  // the two a meet
  spec.unknown = 7;
  EXPECT_EQ(Encode(Bpe(spec), "axxay"), (std::vector<std::int32_t>{0, 7, 7, 0, 7}));
  spec.fuse_unknown = true;
  EXPECT_EQ(Encode(Bpe(spec), "axxay"), (std::vector<std::int32_t>{0, 7, 0, 7}));
}

TEST(BpeTest, IgnoreMergesTakesAPieceThatIsAToken) {
  BpeSpec spec = Doubling(2);
  spec.tokens.emplace_back("aaa", 9);  // no merge makes it
  EXPECT_EQ(Encode(Bpe(spec), "aaa"), (std::vector<std::int32_t>{1, 0}));
  spec.ignore_merges = true;
  EXPECT_EQ(Encode(Bpe(spec), "aaa"), (std::vector<std::int32_t>{9}));
  EXPECT_EQ(Encode(Bpe(spec), "aaaaa"), (std::vector<std::int32_t>{2, 0}));
}

TEST(BpeTest, OfARepeatedPairTheLastRankHolds) {
  BpeSpec spec;
  spec.tokens = {{"a", 0}, {"b", 1}, {"c", 2}, {"ab", 3}, {"bc", 4}};
  spec.merges = {{0, 1, 3}, {1, 2, 4}};
  EXPECT_EQ(Encode(Bpe(spec), "abc"), (std::vector<std::int32_t>{3, 2}));
  spec.merges.push_back({0, 1, 3});
  EXPECT_EQ(Encode(Bpe(spec), "abc"), (std::vector<std::int32_t>{0, 4}));
}

TEST(BpeTest, AnEmptyPieceHasNoIds) { EXPECT_TRUE(Encode(Bpe(Doubling(1)), "").empty()); }

}  // namespace
}  // namespace weft
