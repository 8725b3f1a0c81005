#pragma once

#include <array>
#include <cstdint>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"

namespace weft::kernels {

// What all devices of a communicator have to be given, made by one of them.
using DeviceGroupId = std::array<char, 128>;

struct DeviceGroup {
  DeviceGroupId id{};
  int rank = 0;
  int size = 1;
  absl::Duration join_timeout;    // until all are there, and until they have connected
  absl::Duration stall_timeout;   // that DeviceStream::Synchronize() waits, at most
  bool symmetric_memory = false;  // what Allocate() gives is registered with all ranks
};

// Collectives between devices, one a rank, on memory of the device and in the order of its stream:
// a call enqueues, and may be recorded in a graph once it has run outside of one. Every rank makes
// the same calls with the same sizes in the same order, recorded or not.
//
// Errors: UNAVAILABLE when a peer or the connection to it is lost, or did not come in time; ABORTED
// after Abort(). What happens after a call has enqueued is an error of DeviceStream::Synchronize().
// After one the communicator is done; every later call fails the same way.
//
// Ends before its stream and after the graphs that it is in; what still runs is ended. One thread,
// the stream's, but for Abort().
class DeviceCommunicator {
 public:
  virtual ~DeviceCommunicator() = default;

  virtual int rank() const = 0;
  virtual int size() const = 0;

  // Memory of the device for what goes into calls and comes out of them; with symmetric_memory all
  // of that has to be from here, where the other ranks' devices can reach it. Every rank asks for
  // the same sizes in the same order, before its first call. To be freed before this ends.
  // RESOURCE_EXHAUSTED with the size when it cannot be had.
  virtual absl::StatusOr<void*> Allocate(std::int64_t bytes) = 0;
  virtual void Free(void* data) = 0;

  // data[i] = the sum over ranks of data[i], in place: the same bits on every rank and in every
  // run, in an order that `count` decides.
  virtual absl::Status AllReduceSum(float* data, std::int64_t count) = 0;
  // out[r] = rank r's `in`; `in` may be out[rank()].
  virtual absl::Status AllGather(const void* in, void* out, std::int64_t bytes_per_rank) = 0;
  // out = the sum over ranks of their in[rank()]; `out` may be in[rank()].
  virtual absl::Status ReduceScatterSum(const float* in, float* out,
                                        std::int64_t count_per_rank) = 0;
  // out[r] = rank r's in[rank()].
  virtual absl::Status AllToAll(const void* in, void* out, std::int64_t bytes_per_rank) = 0;

  // Lets the stream's wait, and every later call, fail. Any thread.
  virtual void Abort() = 0;
};

}  // namespace weft::kernels
