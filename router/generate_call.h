#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "router/cluster.h"
#include "router/text/detokenizer.h"
#include "router/text/tokenizer.h"
#include "router/text_pool.h"
#include "router/validate.h"
#include "router/worker_call.h"
#include "server/stream_writer.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// What requests share. Destroy the server first, then the pool, then the cluster, then this: a
// request may be in the hands of any of them.
struct GenerateContext {
  RequestLimits limits;
  std::uint32_t max_attempts = 3;  // how often a request is placed that no group has taken yet
  std::int64_t max_stream_buffer_bytes = std::int64_t{1} << 20;
  const Tokenizer* tokenizer = nullptr;  // null with --skip-tokenizer-init: no text, in or out
  TextPool* text_pool = nullptr;
  Cluster* cluster = nullptr;
};

// One request on its way: validate, tokenize, place, stream from the leader, detokenize. Whoever
// has to call it next (pool, cluster, WorkerCall) holds it.
class GenerateCall final : public WorkerCall::Handler,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  using Writer = StreamWriter<v1::GenerateResponse>;

  GenerateCall(const GenerateContext& context, v1::GenerateRequest request,
               std::chrono::system_clock::time_point deadline);

  // Once. The outcome, errors included, goes to `writer`.
  void Start(std::shared_ptr<Writer> writer);

  // The client has gone or given up: for StreamWriterOptions::on_cancel. Any thread, any time after
  // Start().
  void OnClientGone();

 private:
  void OnWorkerMessage(const v1::WorkerGenerateResponse& response) override;
  void OnWorkerEnd(absl::Status status) override;

  absl::Status Tokenize();
  void Place();
  void OnPlaced(absl::StatusOr<GroupLease> lease);
  v1::WorkerGenerateRequest MakeWorkerRequest() const;

  const GenerateContext& context_;
  v1::GenerateRequest request_;  // request id and seed are drawn, text and token ids moved out
  const std::chrono::system_clock::time_point deadline_;
  std::shared_ptr<Writer> writer_;

  // Each stage is over before the next one starts, so that these need no lock.
  std::vector<std::int32_t> prompt_;
  std::optional<Detokenizer> detokenizer_;
  std::uint32_t attempt_ = 0;
  std::int32_t completion_tokens_ = 0;
  bool started_stream_ = false;  // a message has gone out
  bool finished_ = false;        // the leader gave a finish reason

  Mutex mutex_;
  bool client_gone_ ABSL_GUARDED_BY(mutex_) = false;
  std::optional<Cluster::WaitId> wait_ ABSL_GUARDED_BY(mutex_);
  std::shared_ptr<WorkerCall> worker_call_ ABSL_GUARDED_BY(mutex_);
};

// How waiting responses are bounded and merged; on_cancel is left to the caller.
StreamWriterOptions<v1::GenerateResponse> ResponseStreamOptions(const GenerateContext& context);

}  // namespace weft
