#pragma once

#include <chrono>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "weft/v1/worker.pb.h"

namespace weft {

// The wire to the leader of one group, as the router needs it. gRPC's is in grpc_leader_client.h;
// the simulation has one in virtual time.
class LeaderClient {
 public:
  // A stream that is being read. Cancel() may come at any time, from any thread, also before
  // Start(); it never calls the handler itself.
  class Stream {
   public:
    virtual ~Stream() = default;
    // Once. The handler may be called before this returns.
    virtual void Start() = 0;
    virtual void Cancel() = 0;
  };

  // What comes, one call at a time, on threads of the wire. The end is the last call; the handler
  // is not touched afterwards.
  class WatchHandler {
   public:
    virtual ~WatchHandler() = default;
    virtual void OnState(v1::GroupState state) = 0;
    virtual void OnWatchEnd(const absl::Status& status) = 0;
  };
  class GenerateHandler {
   public:
    virtual ~GenerateHandler() = default;
    // May move out of `response`.
    virtual void OnResponse(v1::WorkerGenerateResponse& response) = 0;
    virtual void OnGenerateEnd(const absl::Status& status) = 0;
  };

  virtual ~LeaderClient() = default;

  // Streams live until their end, whoever holds them; handlers have to. `request` is only read
  // until the end. `block_changes`: whether states tell what the prefix cache holds.
  virtual std::shared_ptr<Stream> WatchState(WatchHandler& handler, bool block_changes) = 0;
  virtual std::shared_ptr<Stream> Generate(const v1::WorkerGenerateRequest& request,
                                           std::chrono::system_clock::time_point deadline,
                                           GenerateHandler& handler) = 0;
  // Nobody waits for it: what comes of it shows in the request's stream.
  virtual void ContinueKv(v1::ContinueKvRequest request) = 0;
};

}  // namespace weft
