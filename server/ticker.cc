#include "server/ticker.h"

#include <utility>

namespace weft {

Ticker::Ticker(std::chrono::milliseconds interval, std::function<void()> tick)
    : interval_(interval), tick_(std::move(tick)), thread_([this] { Run(); }) {}

Ticker::~Ticker() {
  {
    MutexLock lock(mutex_);
    stopping_ = true;
  }
  wake_.NotifyAll();
  thread_.join();
}

void Ticker::Run() {
  auto next = std::chrono::steady_clock::now() + interval_;
  for (;;) {
    {
      MutexLock lock(mutex_);
      while (!stopping_ && wake_.WaitUntil(mutex_, next)) {
      }
      if (stopping_) return;
    }
    tick_();
    next += interval_;
  }
}

}  // namespace weft
