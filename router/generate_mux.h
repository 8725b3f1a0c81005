#pragma once

#include <atomic>
#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/status/status.h"
#include "router/leader_client.h"
#include "server/base/mutex.h"
#include "server/stream_writer.h"
#include "weft/v1/worker.pb.h"

namespace weft {

class GenerateMux;

// A request that shares a stream to its leader with others; see LeaderClient::Generate().
class MuxCall final : public LeaderClient::Stream, public std::enable_shared_from_this<MuxCall> {
 public:
  // The wire to the leader.
  class Opener {
   public:
    virtual ~Opener() = default;
    // Gives `call` to the Start() of a stream that takes it.
    virtual void Place(const std::shared_ptr<MuxCall>& call) = 0;
    // Runs `task` on another thread, at once.
    virtual void RunSoon(std::function<void()> task) = 0;
  };

  MuxCall(std::shared_ptr<Opener> opener, const v1::WorkerGenerateRequest& request,
          std::chrono::system_clock::time_point deadline, LeaderClient::GenerateHandler& handler)
      : opener_(std::move(opener)), request_(request), deadline_(deadline), handler_(handler) {}

  void Start() override;
  // Its end does not wait for the leader.
  void Cancel() override;

  // Only until the end.
  const v1::WorkerGenerateRequest& request() const { return request_; }

 private:
  friend class GenerateMux;

  v1::GenerateCommand StartCommand(std::uint64_t number) const;
  // It runs as `number` of `mux`. False when it has been cancelled meanwhile.
  bool Attach(std::shared_ptr<GenerateMux> mux, std::uint64_t number);
  // To the handler, unless it has had the end.
  void Deliver(v1::WorkerGenerateResponse& response);
  void End(const absl::Status& status);
  void EndSoon();

  const std::shared_ptr<Opener> opener_;
  const v1::WorkerGenerateRequest& request_;
  const std::chrono::system_clock::time_point deadline_;
  LeaderClient::GenerateHandler& handler_;

  Mutex delivery_mutex_;  // held while the handler has a response
  bool ended_ ABSL_GUARDED_BY(delivery_mutex_) = false;

  Mutex mutex_;
  bool cancelled_ ABSL_GUARDED_BY(mutex_) = false;
  std::shared_ptr<GenerateMux> mux_ ABSL_GUARDED_BY(mutex_);
  std::uint64_t number_ ABSL_GUARDED_BY(mutex_) = 0;
};

// The router's end of one Worker.Generate stream: commands of its calls go up, what comes down goes
// to the call it is for. Never waits for a call's handler to be ready for more: handlers buffer.
//
// Thread-safe. The transport is a StreamSink of commands, whose Finish() ends the stream.
// Ownership: shared by the transport and the calls.
class GenerateMux : public std::enable_shared_from_this<GenerateMux> {
 public:
  // `alone`: for one call only, at whose end the stream ends.
  GenerateMux(StreamSink<v1::GenerateCommand>& sink, bool alone);

  // False, with nothing done, when the stream has ended.
  bool Start(const std::shared_ptr<MuxCall>& call);
  // False when it has ended: its handler knows, or will.
  bool Cancel(std::uint64_t number);
  // No calls start here any more, and those that run end with the stream, which ends now.
  void Close();
  bool closed() const;

  // --- The transport's side. Events come one at a time; OnEnd() is the last call.
  void OnEvents(v1::GenerateEvents& events);
  void OnWriteDone(bool ok) { commands_.OnWriteDone(ok); }
  void OnEnd(const absl::Status& status);

 private:
  const bool alone_;
  StreamWriter<v1::GenerateCommand> commands_;
  std::atomic<std::uint64_t> next_number_{1};

  mutable Mutex mutex_;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  absl::flat_hash_map<std::uint64_t, std::shared_ptr<MuxCall>> calls_ ABSL_GUARDED_BY(mutex_);

  std::vector<std::shared_ptr<MuxCall>> addressees_;  // of OnEvents()
};

}  // namespace weft
