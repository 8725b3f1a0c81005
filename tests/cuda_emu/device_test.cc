// A device's memory and modules, by the emulated one.

#include "kernels/cuda/device.h"

#include <cmath>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "kernels/device/cuda_module.h"
#include "kernels/device/mirror.h"
#include "kernels/device/vector.h"
#include "kernels/elementwise.h"
#include "kernels/kv_copy.h"
#include "kernels/linear.h"

namespace weft::kernels {
namespace {

using ::testing::HasSubstr;

class DeviceTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto device = cuda::CudaDevice::Open(0, cpu_);
    ASSERT_TRUE(device.ok()) << device.status();
    device_ = *std::move(device);
  }

  CpuStream cpu_{1};
  std::unique_ptr<DeviceStream> device_;
};

// A step of one kernel: rows of 2 floats that an index names.
struct Gather {
  Gather(int num_rows, DeviceStream& device)
      : rows(*Mirror<float>::Create(2 * num_rows, device)),
        index(*Mirror<std::int32_t>::Create(num_rows, device)),
        out(*Mirror<float>::Create(2 * num_rows, device)) {}

  void Launch(int num_rows, DeviceStream& device) {
    ASSERT_TRUE(GatherRows({.in = rows.data(),
                            .index = index.data(),
                            .out = out.data(),
                            .num_rows = num_rows,
                            .size = 2},
                           device)
                    .ok());
  }

  Mirror<float> rows;
  Mirror<std::int32_t> index;
  Mirror<float> out;
};

TEST_F(DeviceTest, AMirrorIsOneMemoryOnTheCpuAndCopiedOnADevice) {
  auto on_cpu = Mirror<std::int32_t>::Create(3, cpu_);
  ASSERT_TRUE(on_cpu.ok());
  EXPECT_EQ(on_cpu->host(), on_cpu->data());

  Gather gather(2, *device_);
  auto& [rows, index, out] = gather;
  EXPECT_NE(rows.host(), rows.data());
  ASSERT_TRUE(rows.Send(std::vector<float>{1.0F, 2.0F, 3.0F, 4.0F}, *device_).ok());
  ASSERT_TRUE(index.Send(std::vector<std::int32_t>{1, 0}, *device_).ok());
  gather.Launch(2, *device_);
  ASSERT_TRUE(out.Fetch(4, *device_).ok());
  ASSERT_TRUE(device_->Synchronize().ok());
  EXPECT_EQ(std::vector<float>(out.host(), out.host() + 4),
            std::vector<float>({3.0F, 4.0F, 1.0F, 2.0F}));
}

TEST_F(DeviceTest, WhatTheHostForgetsToSendIsSeen) {
  Gather gather(1, *device_);
  auto& [rows, index, out] = gather;
  rows.host()[0] = rows.host()[1] = 1.0F;
  ASSERT_TRUE(index.Send(std::vector<std::int32_t>{0}, *device_).ok());
  gather.Launch(1, *device_);
  ASSERT_TRUE(out.Fetch(2, *device_).ok());
  ASSERT_TRUE(device_->Synchronize().ok());
  EXPECT_TRUE(std::isnan(out.host()[0]));
}

// KV moves while steps run: what copies it neither waits for them nor lets them wait.
TEST_F(DeviceTest, KvIsCopiedOnAStreamOfItsOwn) {
  Gather gather(1, *device_);
  auto& [rows, index, out] = gather;
  ASSERT_TRUE(rows.Send(std::vector<float>{1.0F, 2.0F}, *device_).ok());
  ASSERT_TRUE(index.Send(std::vector<std::int32_t>{0}, *device_).ok());
  gather.Launch(1, *device_);

  const auto side = device_->NewStream();
  ASSERT_TRUE(side.ok()) << side.status();
  auto kv = Mirror<float>::Create(2, **side);
  auto wire = Mirror<float>::Create(2, **side);
  auto segments = Mirror<KvSegment>::Create(1, **side);
  ASSERT_TRUE(kv.ok() && wire.ok() && segments.ok());
  ASSERT_TRUE(kv->Send(std::vector<float>{3.0F, 4.0F}, **side).ok());
  ASSERT_TRUE(
      segments
          ->Send(std::vector<KvSegment>{{.place = 0, .wire = 0, .count = 2, .wire_stride = 1}},
                 **side)
          .ok());
  ASSERT_TRUE((*side)
                  ->KvCopy({.segments = segments->data(),
                            .kv = reinterpret_cast<std::byte*>(kv->data()),
                            .wire = reinterpret_cast<std::byte*>(wire->data()),
                            .num_segments = 1,
                            .value_bytes = 4,
                            .direction = KvCopyDirection::kGather})
                  .ok());
  ASSERT_TRUE(wire->Fetch(2, **side).ok());
  ASSERT_TRUE((*side)->Synchronize().ok());
  EXPECT_EQ(wire->host()[1], 4.0F);
  EXPECT_TRUE(std::isnan(out.data()[0])) << "the step has run for the copy's sake";
  ASSERT_TRUE(device_->Synchronize().ok());
  EXPECT_EQ(out.data()[0], 1.0F);
}

TEST_F(DeviceTest, MemoryOfTheHostIsRefusedWhereTheDevicesIsMeant) {
  float host = 0.0F;
  EXPECT_FALSE(device_->CopyToDevice(&host, &host, sizeof(host)).ok());
  const std::vector<float> ones(4, 1.0F);
  const MatrixView view = {
      .data = ones.data(), .dtype = DType::kFloat32, .rows = 2, .cols = 2, .row_stride = 2};
  const auto weight = PackedMatrix::Pack({&view, 1}, WeightFormat::kFloat32, *device_);
  ASSERT_TRUE(weight.ok()) << weight.status();
  std::vector<float> y(2);
  EXPECT_FALSE(Linear({.x = ones.data(),
                       .weight = &*weight,
                       .bias = nullptr,
                       .residual = nullptr,
                       .y = y.data(),
                       .num_rows = 1,
                       .x_stride = 2,
                       .y_stride = 2},
                      *device_)
                   .ok());
}

TEST_F(DeviceTest, MemoryThatCannotBeHadIsAnErrorWithItsSize) {
  const absl::Status status = Buffer::Allocate(std::int64_t{1} << 60, *device_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kResourceExhausted);
  EXPECT_THAT(std::string(status.message()), HasSubstr("1152921504606846976"));
}

TEST_F(DeviceTest, ARankWithoutADeviceIsToldHowManyThereAre) {
  const absl::Status status = cuda::CudaDevice::Open(64, cpu_).status();
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_THAT(std::string(status.message()), HasSubstr("there are 64"));
}

TEST_F(DeviceTest, AModuleComputesForAProgramWithoutIt) {
  const auto module = OpenCudaDevice(CudaModule::kEmulated, 0, cpu_);
  ASSERT_TRUE(module.ok()) << module.status();
  EXPECT_EQ((*module)->name(), "emulated GPU");
  const auto vector = Vector::Create({1.0F, 2.0F}, **module);
  ASSERT_TRUE(vector.ok()) << vector.status();
  float back[2] = {};
  ASSERT_TRUE((*module)->CopyToHost(back, vector->data(), sizeof(back)).ok());
  ASSERT_TRUE((*module)->Synchronize().ok());
  EXPECT_EQ(back[1], 2.0F);
}

// There is no GPU where this runs, or no module; what is said is one line either way.
TEST_F(DeviceTest, WithoutAGpuOneLineSaysSo) {
  const auto opened = OpenCudaDevice(CudaModule::kCuda, 0, cpu_);
  if (opened.ok()) GTEST_SKIP() << "there is " << (*opened)->name();
  const std::string message(opened.status().message());
  EXPECT_THAT(message, ::testing::AnyOf(HasSubstr("no CUDA device"), HasSubstr("libweft_cuda.so")));
  EXPECT_EQ(message.find('\n'), std::string::npos) << message;
}

}  // namespace
}  // namespace weft::kernels
