#include "worker/group/shared_windows.h"

#include <fcntl.h>

#include <cstring>
#include <optional>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

constexpr std::int64_t kBytes = 100'000;

TEST(SharedWindowsTest, AnotherRankReadsWhatIsWritten) {
  SharedWindows one(2);
  SharedWindows two(2);
  const kernels::Buffer first = *one.Allocate(kBytes);
  const kernels::Buffer second = *one.Allocate(2 * kBytes);
  EXPECT_EQ(reinterpret_cast<std::uintptr_t>(second.data()) % 64, 0);
  const kernels::Buffer theirs[] = {*two.Allocate(kBytes), *two.Allocate(2 * kBytes)};
  ASSERT_TRUE(two.Attach(0, one.handles()).ok());
  const std::optional<SharedWindows::Place> place = one.Find(second.data() + 64, kBytes);
  ASSERT_TRUE(place.has_value());
  const std::byte* const seen = two.At(0, *place, kBytes);
  ASSERT_NE(seen, nullptr);
  EXPECT_NE(seen, second.data() + 64);
  EXPECT_EQ(seen[kBytes - 1], std::byte{0});  // zeroed, as all buffers
  std::memset(second.data() + 64, 7, kBytes);
  EXPECT_EQ(seen[0], std::byte{7});
  EXPECT_EQ(seen[kBytes - 1], std::byte{7});
  EXPECT_EQ(two.At(0, {place->window, 2 * kBytes - 64}, 65), nullptr);
  EXPECT_EQ(two.At(0, {2, 0}, 1), nullptr);
  EXPECT_EQ(two.At(0, {0, 2}, 4), nullptr);  // no float is there
}

TEST(SharedWindowsTest, FindsOnlyWhatLiesInAWindow) {
  SharedWindows windows(1);
  const kernels::Buffer window = *windows.Allocate(kBytes);
  EXPECT_TRUE(windows.Find(window.data(), kBytes).has_value());
  EXPECT_TRUE(windows.Find(window.data() + kBytes, 0).has_value());
  EXPECT_FALSE(windows.Find(window.data(), kBytes + 1).has_value());
  EXPECT_FALSE(windows.Find(window.data() - 1, 1).has_value());
  EXPECT_FALSE(windows.Find(window.data() + 1, kBytes).has_value());
  std::vector<std::byte> other(16);
  EXPECT_FALSE(windows.Find(other.data(), 16).has_value());
  EXPECT_FALSE(windows.Find(nullptr, 0).has_value());
}

TEST(SharedWindowsTest, AttachesOnlyWhatTheHandleSpeaksOf) {
  SharedWindows one(2);
  const kernels::Buffer window = *one.Allocate(kBytes);
  const auto attach = [&](const SharedWindows::Handles& handles) {
    SharedWindows two(2);
    const kernels::Buffer theirs = *two.Allocate(kBytes);
    const absl::Status attached = two.Attach(0, handles);
    // What is not attached is not read.
    EXPECT_EQ(two.At(0, {0, 0}, kBytes) != nullptr, attached.ok());
    return attached.ToString();
  };
  EXPECT_EQ(attach(one.handles()), "OK");
  SharedWindows::Handles handles = one.handles();
  handles.windows[0].key ^= 1;  // as of another process that has the id now
  EXPECT_THAT(attach(handles), HasSubstr("window 0 is not in this PID namespace"));
  handles = one.handles();
  handles.windows[0].descriptor = 0x7fffffff;
  EXPECT_THAT(attach(handles), HasSubstr("window 0 is not in this PID namespace"));
  handles = one.handles();
  handles.windows[0].bytes = 0;  // as of a rank that got no memory
  EXPECT_THAT(attach(handles), HasSubstr("window 0 has 0 bytes there and 100000 here"));
  handles = one.handles();
  handles.windows[1] = handles.windows[0];  // one more than this rank has
  EXPECT_THAT(attach(handles), HasSubstr("window 1 has 100000 bytes there and 0 here"));
  // Memory that is shorter than was said.
  SharedWindows small(2);
  const kernels::Buffer small_window = *small.Allocate(64);
  handles = one.handles();
  handles.windows[0].descriptor = small.handles().windows[0].descriptor;
  handles.windows[0].key = small.handles().windows[0].key;
  EXPECT_THAT(attach(handles), HasSubstr("window 0 is not in this PID namespace"));
}

TEST(SharedWindowsTest, WhatIsTooManyIsMemoryWithoutAWindow) {
  SharedWindows windows(1);
  std::vector<kernels::Buffer> buffers;
  for (std::size_t i = 0; i <= SharedWindows::kMaxWindows; ++i) {
    buffers.push_back(*windows.Allocate(kBytes));
    std::memset(buffers.back().data(), 1, kBytes);
    EXPECT_EQ(windows.Find(buffers.back().data(), kBytes).has_value(),
              i < SharedWindows::kMaxWindows);
  }
  EXPECT_EQ(windows.Allocate(0)->size_bytes(), 0);
}

TEST(SharedWindowsTest, AWindowGoesWithTheLastThatHasIt) {
  std::optional<SharedWindows> one(std::in_place, 2);
  kernels::Buffer window = *one->Allocate(kBytes);
  SharedWindows two(2);
  const kernels::Buffer theirs = *two.Allocate(kBytes);
  const auto descriptor = static_cast<int>(one->handles().windows[0].descriptor);
  ASSERT_TRUE(two.Attach(0, one->handles()).ok());
  window.data()[0] = std::byte{1};
  one.reset();
  EXPECT_EQ(window.data()[0], std::byte{1});  // a buffer may outlive its windows
  EXPECT_GE(fcntl(descriptor, F_GETFD), 0);
  window = {};
  EXPECT_EQ(*two.At(0, {0, 0}, 1), std::byte{1});  // others still have it
  EXPECT_LT(fcntl(descriptor, F_GETFD), 0);
}

}  // namespace
}  // namespace weft
