#include "server/block_hash.h"

#include <set>

#include "fmt/format.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

std::string Hex(const BlockHash& hash) {
  std::string text;
  for (const std::uint8_t byte : hash) text += fmt::format("{:02x}", byte);
  return text;
}

// Python: root = sha256(b"3:" + b"key" + salt); block = sha256(parent + struct.pack("<2i",
// *tokens))
TEST(BlockHashTest, IsSha256OfTheParentAndTheTokens) {
  std::vector<BlockHash> chain = StartHashChain("key", "");
  ExtendHashChain({1, 2, 3, 2147483647, 5}, 2, chain);
  ASSERT_EQ(chain.size(), 3u);  // the fifth token fills no block
  EXPECT_EQ(Hex(chain[0]), "474326a42cd522fa267a84e1acc5fba46c634f6d905f920177c01b87e295a7ed");
  EXPECT_EQ(Hex(chain[1]), "8da0298f9c8773109137448eeb711c4c84bdcfec0a06e163f655ccbcb4c2758f");
  EXPECT_EQ(Hex(chain[2]), "6eff5f3957b1a29a6ed68faab9de0baa05da2cde244c4eece637530c1d617315");
  EXPECT_EQ(Hex(StartHashChain("key", "salt")[0]),
            "7d12bfa207aa1365adec2b30efce33b0ad0514a6ee390edb0d7bfa3fc10ef12f");
}

TEST(BlockHashTest, ExtendingInStepsIsExtendingAtOnce) {
  std::vector<std::int32_t> tokens;
  std::vector<BlockHash> in_steps = StartHashChain("key", "");
  for (std::int32_t i = 0; i < 40; ++i) {
    tokens.push_back(i * i);
    ExtendHashChain(tokens, 3, in_steps);
    std::vector<BlockHash> at_once = StartHashChain("key", "");
    ExtendHashChain(tokens, 3, at_once);
    ASSERT_EQ(in_steps, at_once);
  }
}

TEST(BlockHashTest, DependsOnEverythingBefore) {
  std::set<BlockHash> seen;
  for (const auto& [key, salt] : std::vector<std::pair<std::string, std::string>>{
           {"key", ""}, {"ke", "y"}, {"", "key"}, {"key", "a"}, {"key", "b"}, {"key2", ""}}) {
    for (const std::vector<std::int32_t>& tokens :
         std::vector<std::vector<std::int32_t>>{{1, 2, 3, 4}, {2, 1, 3, 4}, {1, 1, 3, 4}}) {
      std::vector<BlockHash> chain = StartHashChain(key, salt);
      ExtendHashChain(tokens, 2, chain);
      EXPECT_TRUE(seen.insert(chain[2]).second) << key << "/" << salt;
    }
  }
}

TEST(BlockHashTest, KeysTellModelsAndBlockSizesApart) {
  const std::set<std::string> keys = {BlockHashKey(1, 16), BlockHashKey(11, 16),
                                      BlockHashKey(1, 161), BlockHashKey(0, 16)};
  EXPECT_EQ(keys.size(), 4u);
}

}  // namespace
}  // namespace weft
