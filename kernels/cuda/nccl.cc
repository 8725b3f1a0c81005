#include "kernels/cuda/nccl.h"

#include <dlfcn.h>
#include <sched.h>

#include <algorithm>
#include <cstring>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "kernels/cuda/memory.h"
#include "server/base/status_macros.h"

#ifdef WEFT_CUDA_EMU
#include "kernels/cuda/emu/nccl.h"
#elif __has_include(<nccl.h>)
#include <nccl.h>
#endif

namespace weft::kernels::cuda {

#ifdef NCCL_VERSION_CODE
static_assert(sizeof(NcclUniqueId) == sizeof(ncclUniqueId));
static_assert(offsetof(NcclConfig, magic) == offsetof(ncclConfig_t, magic));
static_assert(offsetof(NcclConfig, version) == offsetof(ncclConfig_t, version));
static_assert(offsetof(NcclConfig, blocking) == offsetof(ncclConfig_t, blocking));
static_assert(int{kNcclSuccess} == int{ncclSuccess} &&
              int{kNcclUnhandledCudaError} == int{ncclUnhandledCudaError} &&
              int{kNcclSystemError} == int{ncclSystemError} &&
              int{kNcclInvalidArgument} == int{ncclInvalidArgument} &&
              int{kNcclInvalidUsage} == int{ncclInvalidUsage} &&
              int{kNcclRemoteError} == int{ncclRemoteError} &&
              int{kNcclInProgress} == int{ncclInProgress});
static_assert(int{kNcclUint8} == int{ncclUint8} && int{kNcclFloat32} == int{ncclFloat32} &&
              int{kNcclSum} == int{ncclSum} && kNcclWindowSymmetric == NCCL_WIN_COLL_SYMMETRIC);
#endif

absl::StatusOr<NcclApi> OpenNccl(const char* library) {
  void* const loaded = dlopen(library, RTLD_NOW | RTLD_LOCAL);
  if (loaded == nullptr) {
    return absl::UnimplementedError(
        fmt::format("ranks on CUDA devices exchange by NCCL, which is not there: {}", dlerror()));
  }
  NcclApi api{};
  std::string missing;
  const auto find = [&](const char* name, auto& function) {
    function = reinterpret_cast<std::remove_reference_t<decltype(function)>>(dlsym(loaded, name));
    if (function == nullptr) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", name);
  };
  find("ncclGetUniqueId", api.get_unique_id);
  find("ncclCommInitRankConfig", api.comm_init_rank_config);
  find("ncclCommGetAsyncError", api.comm_get_async_error);
  find("ncclCommAbort", api.comm_abort);
  find("ncclGetErrorString", api.get_error_string);
  find("ncclGetLastError", api.get_last_error);
  find("ncclGroupStart", api.group_start);
  find("ncclGroupEnd", api.group_end);
  find("ncclAllReduce", api.all_reduce);
  find("ncclAllGather", api.all_gather);
  find("ncclReduceScatter", api.reduce_scatter);
  find("ncclSend", api.send);
  find("ncclRecv", api.receive);
  if (!missing.empty()) {
    return absl::UnimplementedError(
        fmt::format("{} has no {}; NCCL of version 2.14 or later is needed", library, missing));
  }
  find("ncclAlltoAll", api.all_to_all);
  find("ncclCommWindowRegister", api.window_register);
  find("ncclCommWindowDeregister", api.window_deregister);
  find("ncclMemAlloc", api.mem_alloc);
  find("ncclMemFree", api.mem_free);
  return api;
}

absl::StatusOr<const NcclApi*> Nccl() {
#ifdef WEFT_CUDA_EMU
  static const absl::StatusOr<NcclApi> api = cuda_emu::EmulatedNccl();
#else
  static const absl::StatusOr<NcclApi> api = OpenNccl("libnccl.so.2");
#endif
  if (!api.ok()) return api.status();
  return &*api;
}

NcclCommunicator::NcclCommunicator(const NcclApi& api, const DeviceGroup& group,
                                   cudaStream_t stream, std::vector<NcclCommunicator*>& all)
    : api_(api), group_(group), stream_(stream), all_(all) {
  all_.push_back(this);
}

NcclCommunicator::~NcclCommunicator() {
  // Never ncclCommDestroy(), which waits for peers that may be gone.
  End(absl::AbortedError("ended")).IgnoreError();
  all_.erase(std::find(all_.begin(), all_.end(), this));
}

absl::StatusOr<std::unique_ptr<NcclCommunicator>> NcclCommunicator::Join(
    const NcclApi& api, const DeviceGroup& group, cudaStream_t stream,
    std::vector<NcclCommunicator*>& all) {
  if (group.symmetric_memory && api.window_register == nullptr) {
    return absl::UnimplementedError(
        "symmetric memory needs ncclCommWindowRegister, of NCCL 2.27 or later");
  }
  std::unique_ptr<NcclCommunicator> joined(new NcclCommunicator(api, group, stream, all));
  NcclUniqueId id;
  static_assert(sizeof(id.internal) == sizeof(group.id));
  std::memcpy(id.internal, group.id.data(), sizeof(id.internal));
  NcclConfig config;
  RETURN_IF_ERROR(
      joined->Finish(api.comm_init_rank_config(&joined->comm_, group.size, id, group.rank, &config),
                     "ncclCommInitRankConfig"));
  return joined;
}

absl::StatusOr<void*> NcclCommunicator::Allocate(std::int64_t bytes) {
  if (!group_.symmetric_memory) return AllocateOnDevice(bytes, "what ranks exchange");
  RETURN_IF_ERROR(Usable());
  void* data = nullptr;
  const auto size = static_cast<std::size_t>(bytes);
  if (const NcclResult result = api_.mem_alloc(&data, size); result != kNcclSuccess) {
    return absl::ResourceExhaustedError(
        fmt::format("ncclMemAlloc: {} bytes of symmetric memory: "
                    "{}",
                    bytes, api_.get_error_string(result)));
  }
  NcclWindow*& window = windows_[data];
  const absl::Status registered =
      Finish(api_.window_register(comm_, data, size, &window, kNcclWindowSymmetric),
             "ncclCommWindowRegister");
  if (registered.ok()) return data;
  Free(data);
  return registered;
}

void NcclCommunicator::Free(void* data) {
  if (!group_.symmetric_memory) {
    cudaFree(data);
    return;
  }
  const auto found = windows_.find(data);
  // None of a device that cannot have any.
  if (comm_ != nullptr && found->second != nullptr) {
    api_.window_deregister(comm_, found->second);
  }
  windows_.erase(found);
  api_.mem_free(data);
}

absl::Status NcclCommunicator::AllReduceSum(float* data, std::int64_t count) {
  RETURN_IF_ERROR(Usable());
  return Finish(api_.all_reduce(data, data, static_cast<std::size_t>(count), kNcclFloat32, kNcclSum,
                                comm_, stream_),
                "ncclAllReduce");
}

absl::Status NcclCommunicator::AllGather(const void* in, void* out, std::int64_t bytes_per_rank) {
  RETURN_IF_ERROR(Usable());
  return Finish(api_.all_gather(in, out, static_cast<std::size_t>(bytes_per_rank), kNcclUint8,
                                comm_, stream_),
                "ncclAllGather");
}

absl::Status NcclCommunicator::ReduceScatterSum(const float* in, float* out,
                                                std::int64_t count_per_rank) {
  RETURN_IF_ERROR(Usable());
  return Finish(api_.reduce_scatter(in, out, static_cast<std::size_t>(count_per_rank), kNcclFloat32,
                                    kNcclSum, comm_, stream_),
                "ncclReduceScatter");
}

absl::Status NcclCommunicator::AllToAll(const void* in, void* out, std::int64_t bytes_per_rank) {
  RETURN_IF_ERROR(Usable());
  if (api_.all_to_all == nullptr) return GroupedAllToAll(in, out, bytes_per_rank);
  return Finish(api_.all_to_all(in, out, static_cast<std::size_t>(bytes_per_rank), kNcclUint8,
                                comm_, stream_),
                "ncclAlltoAll");
}

absl::Status NcclCommunicator::GroupedAllToAll(const void* in, void* out,
                                               std::int64_t bytes_per_rank) {
  const auto bytes = static_cast<std::size_t>(bytes_per_rank);
  NcclResult first = api_.group_start();
  const auto call = [&first](NcclResult result) {
    if (first == kNcclSuccess) first = result;
  };
  for (int r = 0; r < size(); ++r) {
    const std::size_t at = static_cast<std::size_t>(r) * bytes;
    call(api_.send(static_cast<const std::byte*>(in) + at, bytes, kNcclUint8, r, comm_, stream_));
    call(api_.receive(static_cast<std::byte*>(out) + at, bytes, kNcclUint8, r, comm_, stream_));
  }
  call(api_.group_end());
  return Finish(first, "ncclSend and ncclRecv");
}

absl::Status NcclCommunicator::Finish(NcclResult result, std::string_view what) {
  // What is enqueued takes microseconds; what connects first, up to seconds.
  constexpr absl::Duration kBusy = absl::Microseconds(500);
  const absl::Time start = absl::Now();
  while (result == kNcclInProgress) {
    if (comm_ == nullptr) return Failed(kNcclSystemError, what);
    if (const NcclResult asked = api_.comm_get_async_error(comm_, &result); asked != kNcclSuccess) {
      return Failed(asked, what);
    }
    RETURN_IF_ERROR(Usable());
    if (result != kNcclInProgress) break;
    const absl::Duration waited = absl::Now() - start;
    if (waited > group_.join_timeout) {
      return End(absl::UnavailableError(fmt::format("{}: rank {} of {} waited {} for the others",
                                                    what, rank(), size(),
                                                    absl::FormatDuration(group_.join_timeout))));
    }
    if (waited > kBusy) {
      absl::SleepFor(absl::Milliseconds(1));
    } else {
      sched_yield();
    }
  }
  return result == kNcclSuccess ? absl::OkStatus() : Failed(result, what);
}

absl::Status NcclCommunicator::Usable() {
  if (!status_.ok()) return status_;
  if (aborted_.load(std::memory_order_relaxed)) return End(absl::AbortedError("aborted"));
  return absl::OkStatus();
}

absl::Status NcclCommunicator::Check() {
  RETURN_IF_ERROR(Usable());
  NcclResult error = kNcclSuccess;
  const NcclResult asked = api_.comm_get_async_error(comm_, &error);
  if (asked != kNcclSuccess) error = asked;
  // kNcclInProgress: of the stream; it is waited for there.
  if (error == kNcclSuccess || error == kNcclInProgress) return absl::OkStatus();
  return Failed(error, "a collective");
}

absl::Status NcclCommunicator::Failed(NcclResult result, std::string_view what) {
  const char* const text = api_.get_last_error(comm_);
  const std::string message =
      fmt::format("{}: rank {} of {}: {}{}{}", what, rank(), size(), api_.get_error_string(result),
                  text == nullptr || *text == '\0' ? "" : ": ", text == nullptr ? "" : text);
  // Which of us is at fault is NCCL's guess: whatever it is, the group is lost.
  return End(result == kNcclInvalidArgument || result == kNcclInvalidUsage
                 ? absl::InternalError(message)
                 : absl::UnavailableError(message));
}

absl::Status NcclCommunicator::End(absl::Status why) {
  if (status_.ok()) status_ = std::move(why);
  if (NcclComm* const comm = std::exchange(comm_, nullptr)) api_.comm_abort(comm);
  return status_;
}

}  // namespace weft::kernels::cuda
