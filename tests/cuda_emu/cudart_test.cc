// The emulated CUDA runtime: host code that forgets to wait, allocates while a graph is captured or
// mixes up memory fails every time.

#include "kernels/cuda/emu/cudart.h"

#include <vector>

#include "gtest/gtest.h"
#include "kernels/cuda/platform.h"
#include "kernels/cuda/stream.h"

namespace weft::kernels::cuda {
namespace {

struct AddArgs {
  const float* in;
  float* out;
  float addend;
};

void Add(AddArgs a) { a.out[threadIdx.x] = a.in[threadIdx.x] + a.addend; }
void HalfABarrier(AddArgs a) {
  if (threadIdx.x == 0) __syncthreads();
  a.out[threadIdx.x] = 0.0F;
}

constexpr std::size_t kCount = 8;

class CudartTest : public ::testing::Test {
 protected:
  void SetUp() override {
    auto stream = CudaStream::Create();
    ASSERT_TRUE(stream.ok());
    stream_ = *std::move(stream);
    ASSERT_EQ(cudaMalloc(&in_, kCount * sizeof(float)), cudaSuccess);
    ASSERT_EQ(cudaMalloc(&out_, kCount * sizeof(float)), cudaSuccess);
  }
  void TearDown() override {
    EXPECT_EQ(cudaFree(in_), cudaSuccess);
    EXPECT_EQ(cudaFree(out_), cudaSuccess);
  }

  cudaStream_t stream() { return stream_->handle(); }
  void Upload(float value) {
    host_.assign(kCount, value);
    ASSERT_EQ(cudaMemcpyAsync(in_, host_.data(), kCount * sizeof(float), cudaMemcpyHostToDevice,
                              stream()),
              cudaSuccess);
  }
  void LaunchAdd(float addend) {
    const AddArgs args = {static_cast<float*>(in_), static_cast<float*>(out_), addend};
    ASSERT_TRUE(Launch<Add>("Add", 1, kCount, 0, stream(), args).ok());
  }
  void Download() {
    ASSERT_EQ(cudaMemcpyAsync(result_.data(), out_, kCount * sizeof(float), cudaMemcpyDeviceToHost,
                              stream()),
              cudaSuccess);
  }

  std::unique_ptr<CudaStream> stream_;
  void* in_ = nullptr;
  void* out_ = nullptr;
  std::vector<float> host_;
  std::vector<float> result_ = std::vector<float>(kCount, -1.0F);
};

TEST_F(CudartTest, NothingHasHappenedBeforeAWait) {
  Upload(1.0F);
  LaunchAdd(2.0F);
  Download();
  EXPECT_EQ(result_, std::vector<float>(kCount, -1.0F));
  ASSERT_TRUE(stream_->Synchronize().ok());
  EXPECT_EQ(result_, std::vector<float>(kCount, 3.0F));
}

TEST_F(CudartTest, AReplayReadsBuffersAnewAndArgumentsAsTheyWere) {
  float addend = 10.0F;
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  LaunchAdd(addend);
  Download();
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  cudaGraphExec_t exec = nullptr;
  ASSERT_EQ(cudaGraphInstantiate(&exec, graph, 0), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
  addend = 20.0F;
  for (const float value : {1.0F, 5.0F}) {
    Upload(value);
    ASSERT_EQ(cudaGraphLaunch(exec, stream()), cudaSuccess);
    ASSERT_TRUE(stream_->Synchronize().ok());
    EXPECT_EQ(result_, std::vector<float>(kCount, value + 10.0F));
  }
  EXPECT_EQ(cudaGraphExecDestroy(exec), cudaSuccess);
}

TEST_F(CudartTest, AllocatingOrWaitingWhileAGraphIsCapturedIsAnError) {
  ASSERT_EQ(cudaStreamBeginCapture(stream(), cudaStreamCaptureModeThreadLocal), cudaSuccess);
  void* data = nullptr;
  EXPECT_EQ(cudaMalloc(&data, 16), cudaErrorStreamCaptureUnsupported);
  EXPECT_FALSE(stream_->Synchronize().ok());
  cudaGraph_t graph = nullptr;
  ASSERT_EQ(cudaStreamEndCapture(stream(), &graph), cudaSuccess);
  ASSERT_EQ(cudaGraphDestroy(graph), cudaSuccess);
}

TEST_F(CudartTest, HostMemoryIsNoDeviceMemory) {
  std::vector<float> host(kCount);
  EXPECT_EQ(cudaMemcpyAsync(host.data(), host.data(), 4, cudaMemcpyHostToDevice, stream()),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(in_, out_, 4, cudaMemcpyHostToDevice, stream()), cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemcpyAsync(in_, host.data(), kCount * sizeof(float) + 1, cudaMemcpyHostToDevice,
                            stream()),
            cudaErrorInvalidValue);
  EXPECT_EQ(cudaMemsetAsync(host.data(), 0, 4, stream()), cudaErrorInvalidValue);
}

TEST_F(CudartTest, AFaultOfAKernelComesWithTheWaitAndStays) {
  const AddArgs args = {static_cast<float*>(in_), static_cast<float*>(out_), 0.0F};
  ASSERT_TRUE(Launch<HalfABarrier>("HalfABarrier", 1, kCount, 0, stream(), args).ok());
  const absl::Status status = stream_->Synchronize();
  EXPECT_EQ(status.code(), absl::StatusCode::kInternal);
  EXPECT_NE(status.message().find("__syncthreads"), std::string::npos) << status;
  LaunchAdd(1.0F);
  EXPECT_FALSE(stream_->Synchronize().ok());
}

TEST_F(CudartTest, AGridThatNoGpuTakesIsAnError) {
  const AddArgs args = {static_cast<float*>(in_), static_cast<float*>(out_), 0.0F};
  ASSERT_TRUE(Launch<Add>("Add", 1, 2048, 0, stream(), args).ok());
  const absl::Status status = stream_->Synchronize();
  EXPECT_NE(status.message().find("2048 threads"), std::string::npos) << status;
}

}  // namespace
}  // namespace weft::kernels::cuda
