#include "router/text_pool.h"

#include <algorithm>
#include <utility>

#include "fmt/format.h"
#include "server/error_reason.h"

namespace weft {

TextPool::TextPool(int num_threads, std::size_t max_jobs) : max_jobs_(max_jobs) {
  for (int i = 0; i < std::max(1, num_threads); ++i) threads_.emplace_back([this] { Run(); });
}

TextPool::~TextPool() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
    work_.NotifyAll();
  }
  for (std::thread& thread : threads_) thread.join();
}

absl::Status TextPool::Submit(std::function<void()> job) {
  MutexLock lock(mutex_);
  if (jobs_.size() >= max_jobs_) {
    return WithReason(
        absl::ResourceExhaustedError(fmt::format(
            "{} prompts wait to be tokenized already (--max-queued-requests)", jobs_.size())),
        kReasonOverloaded);
  }
  jobs_.push_back(std::move(job));
  work_.NotifyOne();
  return absl::OkStatus();
}

void TextPool::Run() {
  while (true) {
    std::function<void()> job;
    {
      MutexLock lock(mutex_);
      while (jobs_.empty() && !stopping_) work_.Wait(mutex_);
      if (jobs_.empty()) return;
      job = std::move(jobs_.front());
      jobs_.pop_front();
    }
    job();
  }
}

}  // namespace weft
