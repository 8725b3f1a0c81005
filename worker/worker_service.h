#pragma once

#include <atomic>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/mutex.h"
#include "server/group_flags.h"
#include "server/secret.h"
#include "server/stream_writer.h"
#include "server/ticker.h"
#include "weft/v1/worker.grpc.pb.h"
#include "worker/generate_calls.h"
#include "worker/group/join.h"
#include "worker/leader.h"

namespace weft {

// weft.v1.Worker on the leader: Generate over a Leader, the followers' Join streams, WatchState.
// Served from the start of the process; until SetReady() calls of Generate end with UNAVAILABLE
// (NOT_READY) and WatchState says what the group waits for.
//
// Thread-safe.
class WorkerService final : public v1::Worker::CallbackService {
 public:
  // `joins` outlives the service. `on_follower_lost` runs once a joined follower's stream ends.
  // With `join_secret` only those join who send it ("authorization: Bearer SECRET").
  WorkerService(JoinTable& joins, std::uint64_t generation, const WorkerLimits& limits,
                std::function<void(std::int32_t rank, const absl::Status&)> on_follower_lost,
                std::optional<SecretDigest> join_secret = std::nullopt);
  ~WorkerService() override;

  // What people see in `weft status` while the group is not ready: "loading", "waiting for ranks".
  void SetState(std::string state);
  // Tells every joined follower what was settled.
  void AnswerJoins(const v1::JoinResponse& response);
  // Ends every follower's stream with `status`: the group cannot start.
  void RefuseJoins(const absl::Status& status);
  // Serves Generate from now on. `info` has what does not change: layout, sizes; its load and its
  // ranks are filled in for each WatchState message. `leader` outlives the service.
  void SetReady(Leader& leader, const v1::GroupState& info);
  // This rank's own entry of GroupInfo.ranks; followers' come with their Join streams.
  void SetRankInfo(const v1::RankInfo& info);
  // What a rank of the group says of a KV transfer.
  void OnKvReport(const KvReport& report);
  // For probes. UNAVAILABLE when a follower has said nothing for `timeout`; it speaks every 500 ms.
  absl::Status CheckFollowers(absl::Duration timeout);
  // UNAVAILABLE, saying why, while Generate refuses requests.
  absl::Status CheckServing();
  // Refuses new calls of Generate with UNAVAILABLE (DRAINING).
  void StartDrain();
  // Ends those that still run likewise.
  void EndRequests();
  const GenerateCalls& calls() const { return calls_; }
  // Forgets the leader; call it once the server has shut down and before the leader goes.
  void Stop();

  grpc::ServerBidiReactor<v1::GenerateCommand, v1::GenerateEvents>* Generate(
      grpc::CallbackServerContext* context) override;
  grpc::ServerBidiReactor<v1::JoinRequest, v1::JoinResponse>* Join(
      grpc::CallbackServerContext* context) override;
  grpc::ServerWriteReactor<v1::GroupState>* WatchState(
      grpc::CallbackServerContext* context, const v1::WatchStateRequest* request) override;
  grpc::ServerUnaryReactor* ContinueKv(grpc::CallbackServerContext* context,
                                       const v1::ContinueKvRequest* request,
                                       v1::ContinueKvResponse* response) override;

 private:
  class JoinStream;
  using StateWriter = StreamWriter<v1::GroupState>;
  struct Watcher {
    std::weak_ptr<StateWriter> writer;
    bool block_changes = false;  // whether it wants them
    BlockLog::Reader blocks;     // what of them it was told
  };

  // Starts what a router asks for.
  void StartCall(const v1::WorkerGenerateRequest& request, absl::Time deadline, MuxWriter& mux,
                 std::uint64_t call);
  absl::StatusOr<EngineRequest> Accept(const v1::WorkerGenerateRequest& request,
                                       absl::Time deadline);

  void KeepInfo(std::int32_t rank, const v1::RankInfo& info) ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  v1::GroupState CurrentState() ABSL_EXCLUSIVE_LOCKS_REQUIRED(mutex_);
  void Publish() ABSL_LOCKS_EXCLUDED(publish_mutex_, mutex_);
  void Tell(Watcher& watcher, StateWriter& writer, v1::GroupState state)
      ABSL_EXCLUSIVE_LOCKS_REQUIRED(publish_mutex_);

  absl::Status CheckJoinSecret(const grpc::CallbackServerContext& context) const;

  JoinTable& joins_;
  const std::uint64_t generation_;
  const WorkerLimits limits_;
  const std::function<void(std::int32_t rank, const absl::Status&)> on_follower_lost_;
  const std::optional<SecretDigest> join_secret_;

  GenerateCalls calls_;
  std::atomic<Leader*> leader_{nullptr};
  std::atomic<bool> draining_{false};

  Mutex publish_mutex_;  // taken before mutex_
  std::vector<Watcher> watchers_ ABSL_GUARDED_BY(publish_mutex_);
  Mutex mutex_;
  std::uint64_t state_seq_ ABSL_GUARDED_BY(mutex_) = 0;
  v1::GroupState state_ ABSL_GUARDED_BY(mutex_);
  std::vector<v1::RankInfo> ranks_ ABSL_GUARDED_BY(mutex_);      // by rank
  std::vector<absl::Time> ranks_heard_ ABSL_GUARDED_BY(mutex_);  // when; likewise
  std::vector<JoinStream*> join_streams_ ABSL_GUARDED_BY(mutex_);
  std::optional<Ticker> ticker_;  // publishes until Stop()
};

}  // namespace weft
