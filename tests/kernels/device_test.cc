#include <cstdlib>
#include <limits>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/convert.h"
#include "kernels/device/buffer.h"
#include "kernels/device/cpu_target.h"
#include "kernels/device/stream.h"

namespace weft::kernels {
namespace {

TEST(BufferTest, IsAlignedAndZeroed) {
  for (const std::int64_t bytes : {1, 63, 4096, 100'000, 3'000'000, 50'000'000}) {
    absl::StatusOr<Buffer> buffer = Buffer::Allocate(bytes);
    ASSERT_TRUE(buffer.ok()) << buffer.status();
    EXPECT_EQ(buffer->size_bytes(), bytes);
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(buffer->data()) % 64, 0U);
    for (std::int64_t i = 0; i < bytes; ++i) {
      ASSERT_EQ(buffer->as<std::uint8_t>()[i], 0);
      buffer->as<std::uint8_t>()[i] = 0xFF;  // what comes after must not see it
    }
  }
}

TEST(BufferTest, NothingIsNothing) {
  absl::StatusOr<Buffer> buffer = Buffer::Allocate(0);
  ASSERT_TRUE(buffer.ok());
  EXPECT_EQ(buffer->size_bytes(), 0);
}

TEST(BufferTest, MovesItsMemory) {
  Buffer a = *Buffer::Allocate(100);
  std::byte* const data = a.data();
  Buffer b = std::move(a);
  EXPECT_EQ(b.data(), data);
  EXPECT_EQ(b.size_bytes(), 100);
  b = *Buffer::Allocate(5'000'000);
  EXPECT_EQ(b.size_bytes(), 5'000'000);
}

TEST(BufferTest, SaysHowMuchCannotBeHad) {
  const absl::Status status = Buffer::Allocate(std::int64_t{1} << 60).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_NE(status.message().find("1152921504606846976"), std::string::npos) << status;
}

struct HalfType {
  float (*load)(std::uint16_t bits);
  std::uint16_t (*store)(float value);
  std::uint32_t infinity;
};
constexpr HalfType kHalfTypes[] = {{Bf16ToFloat, FloatToBf16, 0x7F80},
                                   {F16ToFloat, FloatToF16, 0x7C00}};

// Every value, by brute force: the 16-bit ones exactly, and roundings to the nearest of them.
TEST(ConvertTest, HalfTypesRoundToNearestEven) {
  for (const HalfType& type : kHalfTypes) {
    for (std::uint32_t bits = 0; bits < type.infinity; ++bits) {
      const float low = type.load(static_cast<std::uint16_t>(bits));
      ASSERT_EQ(type.store(low), bits);
      ASSERT_EQ(type.store(-low), bits | 0x8000);
      if (bits + 1 == type.infinity) break;
      const float high = type.load(static_cast<std::uint16_t>(bits + 1));
      ASSERT_LT(low, high);
      const float middle = low + (high - low) / 2;
      ASSERT_EQ(type.store(middle), bits + bits % 2) << "a tie goes to even: " << bits;
      ASSERT_EQ(type.store(std::nextafter(middle, low)), bits);
      ASSERT_EQ(type.store(std::nextafter(middle, high)), bits + 1);
    }
  }
}

TEST(ConvertTest, KnownValues) {
  EXPECT_EQ(FloatToF16(1.0F), 0x3C00);
  EXPECT_EQ(FloatToF16(65504.0F), 0x7BFF);
  EXPECT_EQ(FloatToF16(65519.99F), 0x7BFF);
  EXPECT_EQ(FloatToF16(65520.0F), 0x7C00);
  EXPECT_EQ(FloatToF16(-1e30F), 0xFC00);
  EXPECT_EQ(FloatToF16(0x1p-24F), 0x0001);
  EXPECT_EQ(FloatToF16(0x1p-25F), 0x0000);
  EXPECT_EQ(FloatToBf16(1.0F), 0x3F80);
  EXPECT_EQ(FloatToBf16(-2.0F), 0xC000);
  EXPECT_EQ(FloatToBf16(std::numeric_limits<float>::max()), 0x7F80);
  constexpr float kInfinity = std::numeric_limits<float>::infinity();
  for (const HalfType& type : kHalfTypes) {
    EXPECT_EQ(type.load(type.store(kInfinity)), kInfinity);
    EXPECT_EQ(type.load(type.store(-kInfinity)), -kInfinity);
    for (const std::uint32_t nan : {0x7F800001U, 0x7FFFFFFFU, 0xFFC00000U}) {
      EXPECT_TRUE(std::isnan(type.load(type.store(std::bit_cast<float>(nan)))));
    }
  }
}

// Runs again with WEFT_CPU_TARGET=scalar: see CMakeLists.txt.
TEST(CpuTargetTest, EnvironmentChoosesTheTarget) {
  ASSERT_TRUE(InitCpuTarget().ok()) << InitCpuTarget();
  const CpuStream stream(1);
  const char* asked = std::getenv("WEFT_CPU_TARGET");
  if (asked == nullptr) {
    ASSERT_TRUE(ForceCpuTarget("").ok());
    const std::string_view best = CpuTargetName();
    EXPECT_TRUE(ForceCpuTarget(best).ok());
    EXPECT_EQ(CpuTargetName(), best);
  } else {
    EXPECT_EQ(CpuTargetName(), asked);
  }
}

TEST(CpuTargetTest, SaysWhatIsAllowed) {
  const absl::Status status = ForceCpuTarget("mmx");
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_NE(status.message().find("mmx"), std::string::npos) << status;
  EXPECT_NE(status.message().find("scalar"), std::string::npos) << status;
  ASSERT_TRUE(ForceCpuTarget("scalar").ok());
  EXPECT_EQ(CpuTargetName(), "scalar");
  ASSERT_TRUE(ForceCpuTarget("").ok());
}

}  // namespace
}  // namespace weft::kernels
