#pragma once

#include <algorithm>
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <limits>
#include <memory>
#include <random>
#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "kernels/cpu/convert.h"
#include "kernels/cuda/stream.h"
#include "kernels/cuda/types.h"
#include "kernels/device/stream.h"
#include "tests/kernels/kernel_test.h"

// CUDA kernels against the CPU's, which are the oracle: in fp32, of inputs rounded as the GPU's
// are.

#ifndef WEFT_CUDA_EMU
// On a GPU nobody chooses the order of threads, and nobody counts: no *CostTest* runs there.
namespace weft::cuda_emu {
enum class Order : std::uint8_t { kFifo };
inline constexpr Order kOrders[] = {Order::kFifo};
inline const char* OrderName(Order) { return "hardware"; }
inline void SetOrder(Order, std::uint64_t = 0) {}
struct Counters {
  std::int64_t launches = 0, matrix_loads = 0, bank_conflicts = 0;
  std::int64_t global_read_bytes = 0, global_written_bytes = 0;
};
inline Counters CountersOfThread() { return {}; }
inline void ResetCounters() {}
}  // namespace weft::cuda_emu
#endif

namespace weft::kernels::cuda {

// As kernels::NumSeeds(), of which an emulated GPU takes other shares.
constexpr std::uint64_t NumSeeds(std::uint64_t seeds) {
#if defined(__SANITIZE_THREAD__)
  return (seeds + 9) / 10;
#elif defined(__SANITIZE_ADDRESS__)
  return (seeds + 3) / 4;
#else
  return seeds;
#endif
}

// By how much the largest cases are smaller where the race detector keeps track of all threads.
#if defined(__SANITIZE_THREAD__)
inline constexpr std::int32_t kShrink = 20;
#else
inline constexpr std::int32_t kShrink = 1;
#endif

// What a T can hold, relative to a value: half of its last place.
template <typename T>
inline constexpr double kRounding = 0.0;
template <>
inline constexpr double kRounding<BFloat16> = 0x1p-8;
template <>
inline constexpr double kRounding<Float16> = 0x1p-11;

template <typename T>
T Rounded(float value) {
  if constexpr (std::is_same_v<T, BFloat16>) {
    return {FloatToBf16(value)};
  } else if constexpr (std::is_same_v<T, Float16>) {
    return {FloatToF16(value)};
  } else {
    return static_cast<T>(value);
  }
}
inline float Wide(float value) { return value; }
inline float Wide(BFloat16 value) { return Bf16ToFloat(value.bits); }
inline float Wide(Float16 value) { return F16ToFloat(value.bits); }

template <typename T>
std::vector<float> RoundedFloats(std::vector<float> values) {
  for (float& value : values) value = Wide(Rounded<T>(value));
  return values;
}

// An array in the device's memory, of just these values: the sanitizer sees who goes past them.
template <typename T>
class DeviceArray {
 public:
  DeviceArray(const std::vector<T>& values, CudaStream& stream)
      : DeviceArray(values.size(), stream) {
    EXPECT_EQ(cudaMemcpyAsync(data_, values.data(), size_ * sizeof(T), cudaMemcpyHostToDevice,
                              stream.handle()),
              cudaSuccess);
    EXPECT_TRUE(stream.Synchronize().ok());
  }
  DeviceArray(std::size_t size, CudaStream& stream) : size_(size), stream_(stream) {
    void* data = nullptr;
    EXPECT_EQ(cudaMalloc(&data, size * sizeof(T)), cudaSuccess);
    data_ = static_cast<T*>(data);
  }
  ~DeviceArray() { cudaFree(data_); }
  DeviceArray(const DeviceArray&) = delete;
  DeviceArray& operator=(const DeviceArray&) = delete;

  T* data() const { return data_; }
  std::size_t size() const { return size_; }

  // Waits for what was launched. Anything that went wrong is a failure of the test.
  std::vector<T> Read() const {
    std::vector<T> values(size_);
    EXPECT_EQ(cudaMemcpyAsync(values.data(), data_, size_ * sizeof(T), cudaMemcpyDeviceToHost,
                              stream_.handle()),
              cudaSuccess);
    const absl::Status status = stream_.Synchronize();
    EXPECT_TRUE(status.ok()) << status;
    return values;
  }

 private:
  T* data_ = nullptr;
  std::size_t size_;
  CudaStream& stream_;
};

template <typename T>
std::vector<T> Stored(const std::vector<float>& values) {
  std::vector<T> stored;
  for (const float value : values) stored.push_back(Rounded<T>(value));
  return stored;
}
template <typename T>
std::vector<float> ReadFloats(const DeviceArray<T>& array) {
  std::vector<float> values;
  for (const T value : array.Read()) values.push_back(Wide(value));
  return values;
}

// A test that runs in every order of the emulated threads.
class CudaTest : public ::testing::TestWithParam<cuda_emu::Order> {
 protected:
  void SetUp() override {
    cuda_emu::SetOrder(GetParam(), 11);
    auto stream = CudaStream::Create();
    ASSERT_TRUE(stream.ok());
    stream_ = *std::move(stream);
  }
  void TearDown() override { cuda_emu::SetOrder(cuda_emu::Order::kFifo); }

  CudaStream& stream() { return *stream_; }
  CpuStream cpu{1};

 private:
  std::unique_ptr<CudaStream> stream_;
};

#define WEFT_IN_EVERY_ORDER(suite)                           \
  INSTANTIATE_TEST_SUITE_P(                                  \
      Orders, suite, ::testing::ValuesIn(cuda_emu::kOrders), \
      [](const auto& test_case) { return std::string(cuda_emu::OrderName(test_case.param)); })

// Calls body with a value of each type of activations.
template <typename Body>
void ForEachType(const Body& body) {
  {
    SCOPED_TRACE("float32");
    body(float());
  }
  {
    SCOPED_TRACE("bfloat16");
    body(BFloat16());
  }
  {
    SCOPED_TRACE("float16");
    body(Float16());
  }
}

// `slack` is what the order of fp32 additions may change, beside the rounding of T.
template <typename T>
void ExpectClose(const std::vector<float>& got, const std::vector<float>& want, double slack) {
  ASSERT_EQ(got.size(), want.size());
  for (std::size_t i = 0; i < got.size(); ++i) {
    const double size = std::abs(double{want[i]});
    ASSERT_NEAR(got[i], want[i], kRounding<T> * size + slack * std::max(1.0, size))
        << "value " << i;
  }
}

}  // namespace weft::kernels::cuda
