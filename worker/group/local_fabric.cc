#include <sched.h>

#include <algorithm>
#include <array>
#include <chrono>
#include <cstring>
#include <map>
#include <utility>
#include <vector>

#include "absl/base/thread_annotations.h"
#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/mutex.h"
#include "worker/group/fabric.h"

namespace weft {
namespace {

// Messages of one sender that may wait before the pool has to grow.
constexpr int kPooledMessages = 32;

struct Message {
  Channel channel{};
  std::uint32_t from_tag = 0;
  bool from_self = false;
  std::size_t bytes = 0;
  // Words, so that payloads are aligned; grows for messages of more than one frame.
  std::vector<std::uint64_t> storage = std::vector<std::uint64_t>(kWholeMessageBytes / 8);
  std::unique_ptr<Message> next;
};

// A queue of messages that recycles them.
class MessageList {
 public:
  void Push(std::unique_ptr<Message> message) {
    Message* const added = message.get();
    (tail_ == nullptr ? head_ : tail_->next) = std::move(message);
    tail_ = added;
  }
  std::unique_ptr<Message> Pop() {
    if (head_ == nullptr) return nullptr;
    std::unique_ptr<Message> message = std::move(head_);
    head_ = std::move(message->next);
    if (head_ == nullptr) tail_ = nullptr;
    return message;
  }
  // Message by message: the destructor of a chain would recurse.
  ~MessageList() {
    while (Pop() != nullptr) {
    }
  }

 private:
  std::unique_ptr<Message> head_;
  Message* tail_ = nullptr;
};

// What the threads share: the receiving end of one fabric. Outlives it as long as a peer looks.
class Inbox {
 public:
  // False when the owner is gone.
  bool Push(Channel channel, std::uint32_t from_tag, bool from_self,
            absl::Span<const absl::Span<const std::byte>> spans, std::size_t bytes) {
    MutexLock lock(mutex_);
    if (closed_) return false;
    std::unique_ptr<Message> message = free_.Pop();
    if (message == nullptr) message = std::make_unique<Message>();
    message->channel = channel;
    message->from_tag = from_tag;
    message->from_self = from_self;
    message->bytes = bytes;
    if (message->storage.size() < (bytes + 7) / 8) message->storage.resize((bytes + 7) / 8);
    std::byte* to = reinterpret_cast<std::byte*>(message->storage.data());
    for (const absl::Span<const std::byte> span : spans) {
      if (!span.empty()) std::memcpy(to, span.data(), span.size());
      to += span.size();
    }
    messages_.Push(std::move(message));
    ++pending_;
    changed_.NotifyOne();
    return true;
  }

  std::unique_ptr<Message> Pop() {
    MutexLock lock(mutex_);
    std::unique_ptr<Message> message = messages_.Pop();
    if (message != nullptr) --pending_;
    return message;
  }

  void Recycle(std::unique_ptr<Message> message) {
    MutexLock lock(mutex_);
    free_.Push(std::move(message));
  }

  void Signal() {
    MutexLock lock(mutex_);
    signalled_ = true;
    changed_.NotifyOne();
  }

  void WaitUntil(std::chrono::steady_clock::time_point deadline) {
    MutexLock lock(mutex_);
    while (pending_ == 0 && !signalled_) {
      if (!changed_.WaitUntil(mutex_, deadline)) break;
    }
    signalled_ = false;
  }

  // From now on the owner is dead; tells those who watch.
  void Close() {
    std::vector<std::weak_ptr<Inbox>> watchers;
    {
      MutexLock lock(mutex_);
      closed_ = true;
      watchers.swap(watchers_);
    }
    for (const std::weak_ptr<Inbox>& watcher : watchers) {
      if (const std::shared_ptr<Inbox> inbox = watcher.lock()) inbox->Signal();
    }
  }

  // A sender connects. It wants to know of our death.
  void Watch(std::weak_ptr<Inbox> watcher) {
    MutexLock lock(mutex_);
    watchers_.push_back(std::move(watcher));
    for (int i = 0; i < kPooledMessages; ++i) free_.Push(std::make_unique<Message>());
  }

  bool closed() {
    MutexLock lock(mutex_);
    return closed_;
  }

 private:
  Mutex mutex_;
  CondVar changed_;
  MessageList messages_ ABSL_GUARDED_BY(mutex_);
  MessageList free_ ABSL_GUARDED_BY(mutex_);
  std::size_t pending_ ABSL_GUARDED_BY(mutex_) = 0;
  bool signalled_ ABSL_GUARDED_BY(mutex_) = false;
  bool closed_ ABSL_GUARDED_BY(mutex_) = false;
  std::vector<std::weak_ptr<Inbox>> watchers_ ABSL_GUARDED_BY(mutex_);
};

// Addresses to inboxes, for Connect().
class Directory {
 public:
  static Directory& Get() {
    static Directory* const directory = new Directory;
    return *directory;
  }

  std::string Add(std::string_view name, const std::shared_ptr<Inbox>& inbox) {
    MutexLock lock(mutex_);
    std::string address = fmt::format("local:{}#{}", name, next_id_++);
    inboxes_.emplace(address, inbox);
    return address;
  }
  void Remove(const std::string& address) {
    MutexLock lock(mutex_);
    inboxes_.erase(address);
  }
  std::shared_ptr<Inbox> Find(std::string_view address) {
    MutexLock lock(mutex_);
    auto it = inboxes_.find(address);
    return it == inboxes_.end() ? nullptr : it->second;
  }

 private:
  Mutex mutex_;
  std::uint64_t next_id_ ABSL_GUARDED_BY(mutex_) = 0;
  std::map<std::string, std::shared_ptr<Inbox>, std::less<>> inboxes_ ABSL_GUARDED_BY(mutex_);
};

class LocalFabric final : public Fabric {
 public:
  explicit LocalFabric(std::string_view name) : address_(Directory::Get().Add(name, inbox_)) {}

  ~LocalFabric() override {
    Directory::Get().Remove(address_);
    inbox_->Close();
  }

  std::string LocalAddress() const override { return address_; }

  absl::StatusOr<PeerId> Connect(std::string_view address, std::uint32_t self_tag) override {
    std::shared_ptr<Inbox> inbox = Directory::Get().Find(address);
    if (inbox == nullptr) {
      if (!address.starts_with("local:")) {
        return absl::InvalidArgumentError(
            fmt::format("'{}' is not the address of a local fabric", address));
      }
      // A fabric that is gone: a peer that is dead from the start.
      inbox = std::make_shared<Inbox>();
      inbox->Close();
    }
    inbox->Watch(inbox_);
    if (free_ids_.empty()) {
      free_ids_.push_back(peers_.size());
      peers_.emplace_back();
    }
    const std::size_t id = free_ids_.back();
    free_ids_.pop_back();
    peers_[id] = {std::move(inbox), self_tag};
    return PeerId{static_cast<std::uint32_t>(id)};
  }

  void Receive(Channel channel, Handler handler) override {
    Handler& slot = handlers_[static_cast<std::size_t>(channel)];
    CHECK_MSG(slot == nullptr, "a channel has one handler");
    slot = std::move(handler);
  }

  absl::Status Send(PeerId peer, Channel channel,
                    absl::Span<const absl::Span<const std::byte>> spans, Done done) override {
    std::size_t bytes = 0;
    for (const absl::Span<const std::byte> span : spans) bytes += span.size();
    if (spans.empty() || spans.size() > kMaxSpans || bytes > std::size_t{kMaxMessageBytes}) {
      return absl::InvalidArgumentError(
          fmt::format("a message of {} bytes in {} spans; allowed are {} bytes in 1 to {} spans",
                      bytes, spans.size(), kMaxMessageBytes, kMaxSpans));
    }
    const Peer& to = At(peer);
    const bool to_self = to.inbox == inbox_;
    if (!to.inbox->Push(channel, to.self_tag, to_self, spans, bytes)) {
      if (done) done(absl::UnavailableError("the peer is gone"));
      return absl::OkStatus();
    }
    if (!to_self) {
      counters_.sent_bytes += bytes;
      ++counters_.sent_messages;
    }
    if (done) done(absl::OkStatus());
    return absl::OkStatus();
  }

  absl::Status PeerStatus(PeerId peer) const override {
    if (At(peer).inbox->closed()) return absl::UnavailableError("the peer is gone");
    return absl::OkStatus();
  }

  void Disconnect(PeerId peer) override {
    CHECK_MSG(At(peer).inbox->closed(), "a peer that is alive stays connected");
    peers_[static_cast<std::size_t>(peer)].inbox = nullptr;
    free_ids_.push_back(static_cast<std::size_t>(peer));
  }

  bool Progress() override {
    bool any = false;
    while (std::unique_ptr<Message> message = inbox_->Pop()) {
      any = true;
      if (!message->from_self) {
        counters_.received_bytes += message->bytes;
        ++counters_.received_messages;
      }
      const Handler& handler = handlers_[static_cast<std::size_t>(message->channel)];
      if (handler) {
        handler(message->from_tag,
                absl::MakeConstSpan(reinterpret_cast<const std::byte*>(message->storage.data()),
                                    message->bytes));
      }
      inbox_->Recycle(std::move(message));
    }
    return any;
  }

  void Wait(absl::Duration timeout) override {
    // Ranks that share a CPU: whoever waits first gives way, which is cheaper than to sleep.
    for (int i = 0; i < 20; ++i) {
      if (Progress()) return;
      sched_yield();
    }
    // An infinite timeout must not overflow the clock.
    const absl::Duration bounded = std::min(timeout, absl::Hours(24));
    inbox_->WaitUntil(std::chrono::steady_clock::now() + absl::ToChronoNanoseconds(bounded));
  }

  void Wake() override { inbox_->Signal(); }

  FabricCounters Counters() const override { return counters_; }

 private:
  struct Peer {
    std::shared_ptr<Inbox> inbox;
    std::uint32_t self_tag;
  };

  const Peer& At(PeerId peer) const {
    const auto index = static_cast<std::size_t>(peer);
    CHECK_MSG(index < peers_.size() && peers_[index].inbox != nullptr,
              "a PeerId comes from Connect()");
    return peers_[index];
  }

  const std::shared_ptr<Inbox> inbox_ = std::make_shared<Inbox>();
  const std::string address_;
  std::vector<Peer> peers_;            // by id
  std::vector<std::size_t> free_ids_;  // of peers_, without an inbox
  std::array<Handler, kNumChannels> handlers_;
  FabricCounters counters_;
};

}  // namespace

std::unique_ptr<Fabric> MakeLocalFabric(std::string_view name) {
  return std::make_unique<LocalFabric>(name);
}

}  // namespace weft
