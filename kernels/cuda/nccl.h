#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <string_view>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "kernels/cuda/platform.h"
#include "kernels/device/device_communicator.h"

namespace weft::kernels::cuda {

// The part of NCCL that Weft calls, from nccl.h of NCCL 2.28 (nccl.cc compares the two where there
// is one): declared here since a build wants no NCCL. What a group of one rank never opens, too.
struct NcclComm;    // NCCL's
struct NcclWindow;  // likewise
struct NcclUniqueId {
  char internal[128];
};
// ncclConfig_t as of 2.14, which later ones take: they go by size and version.
struct NcclConfig {
  std::size_t size = sizeof(NcclConfig);
  unsigned magic = 0xcafebeef;
  unsigned version = 21400;
  int blocking = 0;
};
enum NcclResult : int {
  kNcclSuccess = 0,
  kNcclUnhandledCudaError = 1,
  kNcclSystemError = 2,
  kNcclInvalidArgument = 4,
  kNcclInvalidUsage = 5,
  kNcclRemoteError = 6,
  kNcclInProgress = 7,
};
enum NcclDataType : int { kNcclUint8 = 1, kNcclFloat32 = 7 };
enum NcclRedOp : int { kNcclSum = 0 };
inline constexpr int kNcclWindowSymmetric = 1;  // a flag of ncclCommWindowRegister()

// Its functions, as they are called there.
struct NcclApi {
  NcclResult (*get_unique_id)(NcclUniqueId* id);
  NcclResult (*comm_init_rank_config)(NcclComm** comm, int num_ranks, NcclUniqueId id, int rank,
                                      NcclConfig* config);
  NcclResult (*comm_get_async_error)(NcclComm* comm, NcclResult* error);
  NcclResult (*comm_abort)(NcclComm* comm);
  const char* (*get_error_string)(NcclResult result);
  const char* (*get_last_error)(NcclComm* comm);
  NcclResult (*group_start)();
  NcclResult (*group_end)();
  NcclResult (*all_reduce)(const void* in, void* out, std::size_t count, NcclDataType type,
                           NcclRedOp op, NcclComm* comm, cudaStream_t stream);
  NcclResult (*all_gather)(const void* in, void* out, std::size_t count_per_rank, NcclDataType type,
                           NcclComm* comm, cudaStream_t stream);
  NcclResult (*reduce_scatter)(const void* in, void* out, std::size_t count_per_rank,
                               NcclDataType type, NcclRedOp op, NcclComm* comm,
                               cudaStream_t stream);
  NcclResult (*send)(const void* data, std::size_t count, NcclDataType type, int to, NcclComm* comm,
                     cudaStream_t stream);
  NcclResult (*receive)(void* data, std::size_t count, NcclDataType type, int from, NcclComm* comm,
                        cudaStream_t stream);
  // Null before 2.28.
  NcclResult (*all_to_all)(const void* in, void* out, std::size_t count_per_rank, NcclDataType type,
                           NcclComm* comm, cudaStream_t stream);
  // Null before 2.27.
  NcclResult (*window_register)(NcclComm* comm, void* data, std::size_t bytes, NcclWindow** window,
                                int flags);
  NcclResult (*window_deregister)(NcclComm* comm, NcclWindow* window);
  NcclResult (*mem_alloc)(void** data, std::size_t bytes);
  NcclResult (*mem_free)(void* data);
};

// UNIMPLEMENTED, in one line, when the loader has no such library or it lacks a function.
absl::StatusOr<NcclApi> OpenNccl(const char* library);
// That of this process, opened by the first call: libnccl.so.2, or the emulation's own.
absl::StatusOr<const NcclApi*> Nccl();

// One rank of an NCCL communicator.
class NcclCommunicator final : public DeviceCommunicator {
 public:
  // Of the calling thread's device, for `stream`. Waits for the other ranks. `api` and `all`
  // outlive the result, which is in `all` for as long as it lives.
  static absl::StatusOr<std::unique_ptr<NcclCommunicator>> Join(
      const NcclApi& api, const DeviceGroup& group, cudaStream_t stream,
      std::vector<NcclCommunicator*>& all);
  ~NcclCommunicator() override;
  NcclCommunicator(const NcclCommunicator&) = delete;
  NcclCommunicator& operator=(const NcclCommunicator&) = delete;

  int rank() const override { return group_.rank; }
  int size() const override { return group_.size; }
  absl::Duration stall_timeout() const { return group_.stall_timeout; }
  absl::StatusOr<void*> Allocate(std::int64_t bytes) override;
  void Free(void* data) override;
  absl::Status AllReduceSum(float* data, std::int64_t count) override;
  absl::Status AllGather(const void* in, void* out, std::int64_t bytes_per_rank) override;
  absl::Status ReduceScatterSum(const float* in, float* out, std::int64_t count_per_rank) override;
  absl::Status AllToAll(const void* in, void* out, std::int64_t bytes_per_rank) override;
  void Abort() override { aborted_.store(true, std::memory_order_relaxed); }

  // What has gone wrong with what was enqueued; ends the communicator if anything has.
  absl::Status Check();
  // Ends it: what runs on the stream comes to an end, with nothing in its results.
  absl::Status End(absl::Status why);

 private:
  NcclCommunicator(const NcclApi& api, const DeviceGroup& group, cudaStream_t stream,
                   std::vector<NcclCommunicator*>& all);
  absl::Status Usable();
  absl::Status GroupedAllToAll(const void* in, void* out, std::int64_t bytes_per_rank);
  // For what a call of NCCL returned: waits until it is through with the host's part.
  absl::Status Finish(NcclResult result, std::string_view what);
  absl::Status Failed(NcclResult result, std::string_view what);

  const NcclApi& api_;
  const DeviceGroup group_;
  const cudaStream_t stream_;
  std::vector<NcclCommunicator*>& all_;
  NcclComm* comm_ = nullptr;              // null after End()
  std::map<void*, NcclWindow*> windows_;  // by what they are of
  absl::Status status_;                   // the first error; final
  std::atomic<bool> aborted_{false};
};

}  // namespace weft::kernels::cuda
