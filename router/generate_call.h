#pragma once

#include <chrono>
#include <cstdint>
#include <memory>
#include <string>
#include <vector>

#include "router/access_log.h"
#include "router/cluster.h"
#include "router/request_registry.h"
#include "router/router_metrics.h"
#include "router/sample_call.h"
#include "router/tenants.h"
#include "router/text/chat_template.h"
#include "router/text/tokenizer.h"
#include "router/text_pool.h"
#include "router/validate.h"
#include "server/stream_writer.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// What requests share. Destroy the server first, then the pool, then the cluster, then this: a
// request may be in the hands of any of them.
struct GenerateContext {
  RequestLimits limits;
  std::uint32_t max_attempts = 3;  // how often a request is placed before a group takes it
  std::uint32_t max_replays = 3;   // how many groups a request may lose
  std::int64_t pd_min_prefill_tokens = 128;  // fewer are computed where they are continued
  std::int64_t max_stream_buffer_bytes = std::int64_t{1} << 20;
  const Tokenizer* tokenizer = nullptr;  // null with --skip-tokenizer-init: no text, in or out
  const ChatTemplate* chat_template = nullptr;  // null when the model has none
  TextPool* text_pool = nullptr;
  Cluster* cluster = nullptr;
  RequestRegistry* registry = nullptr;
  RouterMetrics* metrics = nullptr;  // may be null
  AccessLog access_log;              // may be null
  Tenants* tenants = nullptr;        // null without --api-keys-file: everybody may
  std::string metrics_address;       // for GetServerInfo
};

// One request on its way: validate, tokenize, then one SampleCall for each of its samples, whose
// messages share one stream. One sample that fails, fails the call.
//
// Whoever has to call it next (pool, cluster, WorkerCall) holds it.
class GenerateCall final : public SampleCall::Owner,
                           public std::enable_shared_from_this<GenerateCall> {
 public:
  using Writer = StreamWriter<v1::GenerateResponse>;

  // `tenant` is null when the router knows none. Request ids and cached prefixes are a tenant's
  // own. `traceparent` may be empty, `record` null.
  GenerateCall(const GenerateContext& context, v1::GenerateRequest request,
               std::chrono::system_clock::time_point deadline,
               std::shared_ptr<Tenant> tenant = nullptr, std::string traceparent = "",
               std::shared_ptr<AccessRecord> record = nullptr);

  // Once. The outcome, errors included, goes to `writer`.
  void Start(std::shared_ptr<Writer> writer);

  // These two: any thread, any time after Start() was called.
  // Ends the samples that are not finished with FINISH_REASON_ABORTED.
  void Abort();
  // Ends the call at once, unless it has ended: the client learns `status` after what was written,
  // and the request id is free.
  void End(absl::Status status);

 private:
  absl::StatusOr<v1::WorkerGenerateRequest> MakeWorkerRequest(
      std::int32_t index, absl::Span<const std::int32_t> produced,
      std::int32_t vocab_size) const override;
  void OnSamplePlaced(const std::string& group) override;
  void OnSampleMessage(v1::GenerateResponse message) override;
  void OnSampleEnd(std::int32_t index, absl::Status status) override;

  // Until StartSamples(): what has to be so before anything is computed.
  absl::Status Admit();
  // Text to token ids, of the prompt and of bad words.
  absl::Status Tokenize();
  void StartSamples();
  void MakeSamples();
  void CancelSamples();

  const GenerateContext& context_;
  const std::shared_ptr<Tenant> tenant_;
  const std::string traceparent_;
  const std::shared_ptr<AccessRecord> record_;
  // Until the samples start: request id and seed are drawn, text becomes token ids in prompt_.
  v1::GenerateRequest request_;
  const std::chrono::system_clock::time_point deadline_;
  std::string key_;                       // of the request id in the registry
  std::unique_ptr<Tenant::Place> place_;  // until End()
  std::shared_ptr<Writer> writer_;
  std::vector<std::int32_t> prompt_;
  std::vector<std::unique_ptr<SampleCall>> samples_;

  Mutex write_mutex_;  // the first message of all samples has the prompt
  bool wrote_first_ ABSL_GUARDED_BY(write_mutex_) = false;

  Mutex mutex_;
  bool aborted_ ABSL_GUARDED_BY(mutex_) = false;
  bool started_ ABSL_GUARDED_BY(mutex_) = false;  // samples_ is there, and does not change
  bool ended_ ABSL_GUARDED_BY(mutex_) = false;    // what comes now is dropped
  std::int32_t num_running_ ABSL_GUARDED_BY(mutex_) = 0;
};

// How waiting responses are bounded and merged; on_cancel is left to the caller.
StreamWriterOptions<v1::GenerateResponse> ResponseStreamOptions(const GenerateContext& context);

// What a request id or a cache salt is called beyond this router's clients: a tenant's own.
// `tenant` may be null.
std::string NameOf(const Tenant* tenant, std::string_view name);

// The token ids of a prompt: of text as it stands, of a chat rendered with the model's template.
absl::StatusOr<std::vector<std::int32_t>> EncodeText(const GenerateContext& context,
                                                     const std::string& text);
absl::StatusOr<std::vector<std::int32_t>> EncodeChat(const GenerateContext& context,
                                                     const v1::Chat& chat);

}  // namespace weft
