#pragma once

#include <functional>
#include <memory>
#include <string>
#include <thread>

#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "grpcpp/channel.h"
#include "grpcpp/client_context.h"
#include "server/base/mutex.h"
#include "server/grpc_server.h"
#include "weft/v1/worker.grpc.pb.h"
#include "worker/engine/kv_report.h"
#include "worker/group/join.h"
#include "worker/rank.h"

namespace weft {

// A follower's side of Worker.Join: a stream that stays open for life. One thread calls, but for
// Send().
class JoinClient {
 public:
  JoinClient(const std::string& leader_address, const GrpcChannelOptions& options);
  // Ends the stream.
  ~JoinClient();

  // Waits up to `timeout` for somebody to listen at the leader's address, and then for as long as
  // the leader waits for the others. What the leader refuses keeps its code and says why;
  // UNAVAILABLE when nobody listens or the leader ends first.
  absl::StatusOr<GroupAgreement> Join(const RankOffer& offer, const v1::RankInfo& info,
                                      absl::Duration timeout);

  // Runs `on_end` on a thread of its own once the stream ends, whoever ends it.
  void WatchEnd(std::function<void()> on_end);

  // These two on any thread.
  void Send(const v1::RankInfo& info);
  void Send(const KvReport& report);

 private:
  const std::string leader_address_;
  const std::shared_ptr<grpc::Channel> channel_;
  const std::unique_ptr<v1::Worker::Stub> stub_;
  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::JoinRequest, v1::JoinResponse>> stream_;
  Mutex write_mutex_;  // one Write() at a time
  std::thread watch_;
};

}  // namespace weft
