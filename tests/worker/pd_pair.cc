#include "tests/worker/pd_pair.h"

#include <chrono>
#include <utility>

#include "absl/time/clock.h"
#include "gtest/gtest.h"

namespace weft {

struct PdPair::Request {
  EngineRequest request;
  std::uint64_t transfer = 0;
  RequestId decode_id{};

  Mutex mutex;
  CondVar changed;
  std::optional<TokenEvent::KvReserved> reserved ABSL_GUARDED_BY(mutex);
  bool failed ABSL_GUARDED_BY(mutex) = false;  // it is computed on the decode group
  std::optional<std::int32_t> first_token ABSL_GUARDED_BY(mutex);
  bool prefill_ended ABSL_GUARDED_BY(mutex) = false;
  FinishReason prefill_finish ABSL_GUARDED_BY(mutex) = FinishReason::kNone;
  bool decode_ended ABSL_GUARDED_BY(mutex) = false;
  Completion completion ABSL_GUARDED_BY(mutex);

  bool WaitUntil(const std::function<bool()>& condition) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    MutexLock lock(mutex);
    while (!condition()) {
      if (!changed.WaitUntil(mutex, deadline)) return false;
    }
    return true;
  }
};

class PdPair::DecodeSink final : public TokenSink {
 public:
  explicit DecodeSink(std::shared_ptr<Request> request) : request_(std::move(request)) {}
  void OnEvent(const TokenEvent& event) override {
    MutexLock lock(request_->mutex);
    if (event.kv_reserved.has_value()) request_->reserved = event.kv_reserved;
    if (!event.kv_failure.empty()) request_->failed = true;
    std::vector<std::int32_t>& tokens = request_->completion.token_ids;
    // What the prefill group has said is not repeated, and nothing is left out.
    if (event.token_id.has_value() && event.output_index == static_cast<int>(tokens.size())) {
      tokens.push_back(*event.token_id);
    }
    if (event.finish != FinishReason::kNone) {
      request_->completion.finish = event.finish;
      request_->completion.status = event.error;
      request_->completion.num_preemptions = event.num_preemptions;
      request_->decode_ended = true;
    }
    request_->changed.NotifyAll();
  }
  void OnRefused(const absl::Status& status) override {
    MutexLock lock(request_->mutex);
    request_->completion.status = status;
    request_->decode_ended = true;
    request_->changed.NotifyAll();
  }

 private:
  const std::shared_ptr<Request> request_;
};

class PdPair::PrefillSink final : public TokenSink {
 public:
  explicit PrefillSink(std::shared_ptr<Request> request) : request_(std::move(request)) {}
  void OnEvent(const TokenEvent& event) override {
    MutexLock lock(request_->mutex);
    if (event.token_id.has_value()) {
      request_->first_token = event.token_id;
      if (request_->completion.token_ids.empty()) {
        request_->completion.token_ids.push_back(*event.token_id);
      }
    }
    request_->prefill_ended = event.finish != FinishReason::kNone;
    request_->prefill_finish = event.finish;
    request_->changed.NotifyAll();
  }
  void OnRefused(const absl::Status& status) override {
    MutexLock lock(request_->mutex);
    request_->completion.status = status;
    request_->prefill_ended = true;
    request_->changed.NotifyAll();
  }

 private:
  const std::shared_ptr<Request> request_;
};

std::shared_ptr<const std::string> PdPair::Target(const TokenEvent::KvReserved& reserved) const {
  const ShardLayout& layout = decode_.model(0).layout;
  v1::KvTarget target;
  target.set_transfer_id(reserved.transfer);
  target.set_first_position(reserved.first_position);
  v1::KvEndpoint& endpoint = *target.mutable_endpoint();
  endpoint.set_format(KvFormatOf(decode_.model(0)));
  endpoint.set_tensor_parallel_size(layout.tensor_parallel_size());
  endpoint.set_decode_context_parallel_size(layout.decode_context_parallel_size());
  endpoint.set_block_size(layout.block_size());
  endpoint.set_cp_kv_cache_interleave_size(layout.interleave());
  for (const std::string& address : decode_.kv_addresses()) endpoint.add_fabric_addresses(address);
  return std::make_shared<const std::string>(target.SerializeAsString());
}

std::vector<Completion> PdPair::Generate(std::vector<EngineRequest> requests, std::string failure) {
  static std::uint64_t next_transfer = 1;
  std::vector<std::shared_ptr<Request>> all;
  for (EngineRequest& request : requests) {
    all.push_back(std::make_shared<Request>());
    Request& at = *all.back();
    at.request = std::move(request);
    at.request.kv_transfer = next_transfer++;
    const auto id = decode_.leader().Submit(at.request, std::make_shared<DecodeSink>(all.back()));
    EXPECT_TRUE(id.ok()) << id.status();
    if (id.ok()) at.decode_id = *id;
  }
  for (const auto& at : all) {
    EXPECT_TRUE(at->WaitUntil([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return at->reserved.has_value() || at->decode_ended;
    })) << "not reserved";
    MutexLock lock(at->mutex);
    if (!at->reserved.has_value()) continue;
    num_cached_ += at->reserved->first_position;
    EngineRequest prefill = at->request;
    prefill.kv_target = Target(*at->reserved);
    prefill.kv_first_position = at->reserved->first_position;
    const auto id = prefill_.leader().Submit(std::move(prefill), std::make_shared<PrefillSink>(at));
    EXPECT_TRUE(id.ok()) << id.status();
  }
  for (const auto& at : all) {
    EXPECT_TRUE(at->WaitUntil([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return at->first_token.has_value() || at->prefill_ended || at->decode_ended;
    })) << "no first token";
    std::optional<std::int32_t> token;
    {
      MutexLock lock(at->mutex);
      token = at->first_token;
    }
    decode_.leader().ContinueKv(at->decode_id, failure.empty() ? token : std::nullopt, failure);
  }
  std::vector<Completion> completions;
  for (const auto& at : all) {
    EXPECT_TRUE(at->WaitUntil([&]() ABSL_NO_THREAD_SAFETY_ANALYSIS {
      return at->decode_ended && at->prefill_ended;
    })) << "no end";
    MutexLock lock(at->mutex);
    num_recomputed_ += at->failed;
    completions.push_back(at->completion);
  }
  return completions;
}

}  // namespace weft
