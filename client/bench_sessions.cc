#include "client/bench_sessions.h"

#include <algorithm>
#include <atomic>
#include <thread>
#include <utility>

#include "absl/time/clock.h"
#include "server/base/mutex.h"

namespace weft {

AgenticSession::AgenticSession(const AgenticLoad& load, std::int32_t index)
    : load_(load), random_(load.seed) {
  Draw(load.prefix_len);
  random_.seed(load.seed + 1 + static_cast<std::uint64_t>(index));
  Draw(load.session_len);
}

void AgenticSession::Draw(std::int32_t count) {
  std::uniform_int_distribution<std::int32_t> token(0, load_.vocab_size - 1);
  for (std::int32_t i = 0; i < count; ++i) tokens_.push_back(token(random_));
}

v1::GenerateRequest AgenticSession::NextTurn() {
  Draw(load_.turn_len);
  v1::GenerateRequest request;
  request.mutable_token_ids()->mutable_ids()->Add(tokens_.begin(), tokens_.end());
  request.mutable_sampling()->set_max_tokens(load_.output_len);
  request.mutable_sampling()->set_ignore_eos(true);
  return request;
}

void AgenticSession::Append(absl::Span<const std::int32_t> token_ids) {
  tokens_.insert(tokens_.end(), token_ids.begin(), token_ids.end());
}

absl::Duration RunSessions(v1::Inference::Stub& stub, const AgenticLoad& load,
                           std::int32_t concurrency,
                           const std::function<void(v1::GenerateRequest& request)>& prepare,
                           const std::function<void(const Completion& completion,
                                                    const RequestTiming& timing)>& on_completion) {
  const absl::Time start = absl::Now();
  std::atomic<std::int32_t> next{0};
  Mutex mutex;
  const auto run_some = [&] {
    for (std::int32_t index; (index = next++) < load.num_sessions;) {
      AgenticSession session(load, index);
      bool ok = true;
      for (std::int32_t turn = 0; ok && turn < load.num_turns; ++turn) {
        v1::GenerateRequest request = session.NextTurn();
        {
          MutexLock lock(mutex);
          prepare(request);
        }
        RunBatch(stub, {std::move(request)},
                 {.on_completion = [&](std::size_t, const Completion& completion,
                                       const RequestTiming& timing) {
                   session.Append(completion.token_ids);
                   ok = completion.status.ok();
                   MutexLock lock(mutex);
                   on_completion(completion, timing);
                 }});
      }
    }
  };
  std::vector<std::thread> threads;
  for (std::int32_t i = 0; i < std::min(concurrency, load.num_sessions); ++i) {
    threads.emplace_back(run_some);
  }
  for (std::thread& thread : threads) thread.join();
  return absl::Now() - start;
}

}  // namespace weft
