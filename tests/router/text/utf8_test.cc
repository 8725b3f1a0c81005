#include "router/text/utf8.h"

#include <cstdint>
#include <string>

#include "gtest/gtest.h"

namespace weft {
namespace {

// The bits written out, apart from the code under test.
std::string Utf8(std::uint32_t c) {
  const auto tail = [](std::uint32_t bits) { return static_cast<char>(0x80 | (bits & 0x3F)); };
  if (c < 0x80) return {static_cast<char>(c)};
  if (c < 0x800) return {static_cast<char>(0xC0 | c >> 6), tail(c)};
  if (c < 0x10000) return {static_cast<char>(0xE0 | c >> 12), tail(c >> 6), tail(c)};
  return {static_cast<char>(0xF0 | c >> 18), tail(c >> 12), tail(c >> 6), tail(c)};
}

bool IsSurrogate(std::uint32_t c) { return c >= 0xD800 && c < 0xE000; }

TEST(Utf8Test, EveryCharacterIsWholeAndEveryPrefixOfItIncomplete) {
  for (std::uint32_t c = 0; c < 0x110000; ++c) {
    if (IsSurrogate(c)) continue;
    const std::string bytes = Utf8(c);
    const Utf8Part part = ScanUtf8(bytes + "\xFF");
    ASSERT_EQ(part.kind, Utf8Kind::kCharacter) << c;
    ASSERT_EQ(part.num_bytes, bytes.size()) << c;
    for (std::size_t n = 1; n < bytes.size(); ++n) {
      const Utf8Part prefix = ScanUtf8(std::string_view(bytes).substr(0, n));
      ASSERT_EQ(prefix.kind, Utf8Kind::kIncomplete) << c;
      ASSERT_EQ(prefix.num_bytes, n) << c;
      // Cut off by a byte that cannot follow, the prefix is one maximal part.
      const Utf8Part cut = ScanUtf8(bytes.substr(0, n) + "A");
      ASSERT_EQ(cut.kind, Utf8Kind::kInvalid) << c;
      ASSERT_EQ(cut.num_bytes, n) << c;
    }
  }
}

TEST(Utf8Test, OverlongFormsSurrogatesAndWhatIsAboveUnicodeAreInvalid) {
  for (const std::string bytes : {"\xC0\x80", "\xC1\xBF", "\xE0\x9F\xBF", "\xF0\x8F\xBF\xBF",
                                  "\xED\xA0\x80", "\xF4\x90\x80\x80", "\xF5\x80", "\xFF", "\x80"}) {
    EXPECT_EQ(ScanUtf8(bytes).kind, Utf8Kind::kInvalid);
    EXPECT_EQ(ScanUtf8(bytes).num_bytes, 1U);
  }
}

TEST(Utf8Test, FindsTheFirstByteThatIsNoPartOfACharacter) {
  EXPECT_EQ(FindInvalidUtf8(""), std::nullopt);
  EXPECT_EQ(FindInvalidUtf8("aé日𠮷"), std::nullopt);
  EXPECT_EQ(FindInvalidUtf8("aé\xFFz"), 3U);
  EXPECT_EQ(FindInvalidUtf8("ab\xE6\x97"), 2U);  // cut off
}

}  // namespace
}  // namespace weft
