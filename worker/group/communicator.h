#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>
#include <memory>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "absl/types/span.h"
#include "kernels/device/buffer.h"
#include "kernels/device/stream.h"
#include "kernels/dtype.h"
#include "worker/group/fabric.h"

namespace weft::kernels {
class DeviceCommunicator;
}

namespace weft {

// What a communicator has done since it was made.
struct CollectiveCounters {
  std::uint64_t operations = 0;
  std::uint64_t received_bytes = 0;  // payload from other ranks: what the formulas of dcp.md count
  absl::Duration waiting;            // time spent inside collectives
};

// Collectives over an ordered set of ranks. Every rank of the set makes the same calls with the
// same sizes in the same order (law 4). A rank's own part never travels. On the CPU a call returns
// when the result is there; on CUDA it enqueues on `stream`.
//
// Sums are taken in rank order, whatever arrives first, on CUDA in an order that NCCL takes: the
// same bits on every rank and in every run. Errors: UNAVAILABLE when a peer died or nothing arrived
// for `stall_timeout`, ABORTED after Abort(), INTERNAL when ranks disagree about the call (the
// message names both); on CUDA they may come with the stream's next wait. After one of these every
// later call fails the same way, the group is done, and the buffers of the failed call must outlive
// the fabric (those of Allocate() do) unchanged. INVALID_ARGUMENT for sizes over max_bytes and
// UNIMPLEMENTED for sums of other types than fp32, with nothing sent. Allocates nothing after the
// first call, but by Allocate().
//
// `in` and `out` may overlap only where a method says so. A call with 0 bytes is a barrier.
//
// Threading: the rank's executor thread; Abort() from any thread.
class Communicator {
 public:
  virtual ~Communicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Where kernels of `stream` and calls with it read and write: what every `in` and `out` on a
  // device is to be from. On the CPU ranks of one host read a long `in` from here where it lies;
  // either all of them give a call memory from here, or none. All ranks ask for the same sizes in
  // the same order, before their first call (later it is memory like any); freed before this ends.
  // Errors as those of Buffer::Allocate().
  virtual absl::StatusOr<kernels::Buffer> Allocate(std::int64_t bytes, kernels::Stream& stream) {
    return kernels::Buffer::Allocate(bytes, stream);
  }

  // data[i] = sum over ranks of data[i], in place.
  virtual absl::Status AllReduceSum(void* data, std::int64_t count, DType dtype,
                                    kernels::Stream& stream) = 0;
  // out[r] = rank r's `in`; `in` may be out[rank()].
  virtual absl::Status AllGather(const void* in, void* out, std::int64_t bytes_per_rank,
                                 kernels::Stream& stream) = 0;
  // out = sum over ranks of their in[rank()], each part `count_per_rank` long. `out` may be
  // in[rank()].
  virtual absl::Status ReduceScatterSum(const void* in, void* out, std::int64_t count_per_rank,
                                        DType dtype, kernels::Stream& stream) = 0;
  // out[r] = rank r's in[rank()].
  virtual absl::Status AllToAll(const void* in, void* out, std::int64_t bytes_per_rank,
                                kernels::Stream& stream) = 0;
  // On rank 0: out[r] = rank r's `in`; others may pass null and return once `in` may be reused.
  virtual absl::Status Gather(const void* in, void* out, std::int64_t bytes_per_rank,
                              kernels::Stream& stream) = 0;

  virtual CollectiveCounters Counters() const = 0;
  // Memory it holds for messages.
  virtual std::int64_t workspace_bytes() const = 0;

  // Makes the running and every later call return ABORTED. Any thread.
  virtual void Abort() = 0;
};

struct FabricCommunicatorOptions {
  std::uint32_t id =
      0;  // tells this communicator's messages from others' on the fabric; the same on every rank
  std::int64_t max_bytes = 0;  // the largest `in` or `out` (all ranks' parts together) of any call
  absl::Duration stall_timeout = absl::Seconds(3);
  // Counts progress for the watchdog; may be null. Incremented whenever a collective ends.
  std::atomic<std::uint64_t>* progress = nullptr;
};

// Several communicators share a fabric's kCollective channel through one mux; it installs the
// channel's handler. Lives as long as the communicators made with it, which must go before the
// fabric. Up to 256 messages (2 MB) wait for communicators that this rank has yet to make.
class CollectiveMux;
std::shared_ptr<CollectiveMux> MakeCollectiveMux(Fabric& fabric);

// Host collectives as fabric messages. `peers[i]` reaches rank i and is ignored for i == rank.
// Peers must have connected with self_tag values given in `tags`: tags[i] is what rank i's messages
// carry.
std::unique_ptr<Communicator> MakeFabricCommunicator(std::shared_ptr<CollectiveMux> mux, int rank,
                                                     absl::Span<const PeerId> peers,
                                                     absl::Span<const std::uint32_t> tags,
                                                     const FabricCommunicatorOptions& options);

// Collectives on a device's memory by `device`, and on the host's, of calls with its stream, by
// `host`; both connect the same ranks. Gather() is of the host's memory alone. Counts what is
// enqueued, and nothing that a graph does again; time spent waiting is the host's.
std::unique_ptr<Communicator> MakeDeviceCommunicator(
    std::unique_ptr<Communicator> host, std::unique_ptr<kernels::DeviceCommunicator> device);

// For groups of one rank: every collective is a copy or nothing.
std::unique_ptr<Communicator> MakeSelfCommunicator();

}  // namespace weft
