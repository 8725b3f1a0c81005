#include "tests/worker/group/fabric_checks.h"

#include <malloc.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstring>
#include <filesystem>
#include <iterator>
#include <random>
#include <thread>
#include <vector>

#include "fmt/format.h"
#include "server/base/check.h"
#include "tests/worker/group/collective_checks.h"

namespace weft {
namespace {

constexpr Channel kChannels[] = {Channel::kControl, Channel::kPlan, Channel::kKv};

// What message number `index` from rank `from` to rank `to` looks like, known to both.
struct Letter {
  Channel channel;
  std::size_t bytes;
  std::uint64_t content;  // seed of the bytes
};

Letter MakeLetter(std::uint64_t seed, int from, int to, int index, std::int64_t largest_bytes) {
  std::mt19937_64 random(seed * 1000003 + static_cast<std::uint64_t>(from * 64 + to) * 8191 +
                         static_cast<std::uint64_t>(index));
  random.discard(3);
  Letter letter{.channel = kChannels[random() % 3], .bytes = 0, .content = random()};
  switch (random() % 8) {
    case 0:
      letter.bytes = random() % 9;
      break;
    case 1:  // around one frame
      letter.bytes = static_cast<std::size_t>(kWholeMessageBytes) - 2 + random() % 5;
      break;
    case 2:
      letter.bytes = random() % 300000;
      break;
    case 3:
      letter.bytes = 950 + random() % 80;  // around the limit of gathered frames
      break;
    default:
      letter.bytes = random() % 4000;
  }
  if (index == 7) letter.bytes = static_cast<std::size_t>(largest_bytes);
  return letter;
}

std::vector<std::byte> Content(const Letter& letter) {
  std::vector<std::byte> bytes(letter.bytes);
  std::uint64_t x = letter.content | 1;
  for (std::size_t i = 0; i < bytes.size(); i += sizeof(x)) {
    x = x * 6364136223846793005ULL + 1442695040888963407ULL;
    std::memcpy(&bytes[i], &x, std::min(sizeof(x), bytes.size() - i));
  }
  return bytes;
}

class OrderCheck {
 public:
  OrderCheck(RankContext& context, std::uint64_t seed, int num_messages, std::int64_t largest_bytes)
      : context_(context),
        seed_(seed),
        num_messages_(num_messages),
        largest_bytes_(largest_bytes),
        random_(seed + static_cast<std::uint64_t>(context.rank) * 77),
        next_(context.peers.size(), 0) {}

  std::string Run() {
    for (const Channel channel : kChannels) {
      context_.fabric->Receive(
          channel, [this, channel](std::uint32_t from, absl::Span<const std::byte> payload) {
            OnLetter(channel, from, payload);
          });
    }
    const int size = static_cast<int>(context_.peers.size());
    std::vector<std::vector<std::byte>> contents;
    contents.reserve(static_cast<std::size_t>(size * num_messages_));
    for (int index = 0; index < num_messages_; ++index) {
      for (int to = 0; to < size; ++to) {
        const Letter letter = MakeLetter(seed_, context_.rank, to, index, largest_bytes_);
        contents.push_back(Content(letter));
        SendInSpans(to, letter.channel, contents.back());
        if (random_() % 4 == 0) context_.fabric->Progress();
      }
    }
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(60);
    while (error_.empty() && !Finished()) {
      context_.fabric->Wait(absl::Milliseconds(100));
      if (std::chrono::steady_clock::now() > deadline) return Where("timed out");
    }
    if (error_.empty()) CheckCounters();
    return error_;
  }

 private:
  bool Finished() const {
    return sends_pending_ == 0 &&
           std::all_of(next_.begin(), next_.end(), [this](int n) { return n == num_messages_; });
  }

  std::string Where(std::string_view what) const {
    return fmt::format("seed {} rank {}: {}", seed_, context_.rank, what);
  }

  void SendInSpans(int to, Channel channel, const std::vector<std::byte>& content) {
    std::vector<absl::Span<const std::byte>> spans;
    std::size_t at = 0;
    const std::size_t num_spans = 1 + random_() % kMaxSpans;
    for (std::size_t i = 0; i < num_spans; ++i) {
      const std::size_t n =
          i + 1 == num_spans ? content.size() - at : random_() % (content.size() - at + 1);
      spans.push_back(absl::MakeConstSpan(content.data() + at, n));
      at += n;
    }
    ++sends_pending_;
    if (to != context_.rank) {
      sent_bytes_ += content.size();
      ++sent_messages_;
    }
    const absl::Status status =
        context_.fabric->Send(context_.peers[static_cast<std::size_t>(to)], channel, spans,
                              [this](const absl::Status& sent) {
                                --sends_pending_;
                                if (!sent.ok()) error_ = Where(sent.ToString());
                              });
    if (!status.ok()) error_ = Where(status.ToString());
  }

  void OnLetter(Channel channel, std::uint32_t from, absl::Span<const std::byte> payload) {
    if (!error_.empty()) return;
    if (from >= next_.size()) {
      error_ = Where(fmt::format("a message from tag {}", from));
      return;
    }
    const int index = next_[from]++;
    const Letter letter =
        MakeLetter(seed_, static_cast<int>(from), context_.rank, index, largest_bytes_);
    const std::string what = fmt::format("message {} of rank {}", index, from);
    if (index >= num_messages_) {
      error_ = Where(what + " is one too many");
    } else if (channel != letter.channel || payload.size() != letter.bytes) {
      error_ = Where(fmt::format("{}: {} bytes on channel {}, not {} on {}", what, payload.size(),
                                 static_cast<int>(channel), letter.bytes,
                                 static_cast<int>(letter.channel)));
    } else if (reinterpret_cast<std::uintptr_t>(payload.data()) % 8 != 0) {
      error_ = Where(what + " is not aligned");
    } else if (!std::ranges::equal(payload, Content(letter))) {
      error_ = Where(what + " has wrong bytes");
    }
    if (static_cast<int>(from) != context_.rank) {
      received_bytes_ += payload.size();
      ++received_messages_;
    }
  }

  void CheckCounters() {
    const FabricCounters counters = context_.fabric->Counters();
    // Others may be at the barrier that follows, which sends headers.
    const std::uint64_t barrier = counters.received_messages - received_messages_;
    if (counters.sent_bytes != sent_bytes_ || counters.sent_messages != sent_messages_ ||
        counters.received_bytes != received_bytes_ + 32 * barrier || barrier >= next_.size()) {
      error_ =
          Where(fmt::format("counters say {} bytes in {} messages out, {} in {} in; it was "
                            "{} in {} and {} in {}",
                            counters.sent_bytes, counters.sent_messages, counters.received_bytes,
                            counters.received_messages, sent_bytes_, sent_messages_,
                            received_bytes_, received_messages_));
    }
  }

  RankContext& context_;
  const std::uint64_t seed_;
  const int num_messages_;
  const std::int64_t largest_bytes_;
  std::mt19937_64 random_;
  std::vector<int> next_;  // by sender
  int sends_pending_ = 0;
  std::uint64_t sent_bytes_ = 0;
  std::uint64_t sent_messages_ = 0;
  std::uint64_t received_bytes_ = 0;
  std::uint64_t received_messages_ = 0;
  std::string error_;
};

}  // namespace

std::string CheckOrder(RankContext& context, std::uint64_t seed, int num_messages,
                       std::int64_t largest_bytes) {
  OrderCheck check(context, seed, num_messages, largest_bytes);
  const std::string error = check.Run();
  if (!error.empty()) return error;
  // Nobody leaves before all have everything: destruction drops what is in flight.
  NoStream stream;
  return std::string(context.MakeCommunicator({.id = 99, .max_bytes = 64})
                         ->AllGather(nullptr, nullptr, 0, stream)
                         .message());
}

std::string CheckWake(RankContext& context) {
  const auto waited = [&context] {
    const auto start = std::chrono::steady_clock::now();
    // A fabric may return early, and sleeps at most 500 ms at a time by itself.
    while (true) {
      const auto before = std::chrono::steady_clock::now();
      context.fabric->Wait(absl::Seconds(30));
      const auto now = std::chrono::steady_clock::now();
      if (now - before < std::chrono::milliseconds(450)) return now - start;
    }
  };
  context.fabric->Wake();
  if (waited() > std::chrono::milliseconds(450)) return "a Wake() before Wait() was lost";
  for (int i = 0; i < 20; ++i) {
    std::atomic<bool> woken{false};
    std::thread waker([&] {
      std::this_thread::sleep_for(std::chrono::milliseconds(i % 4));
      woken = true;
      context.fabric->Wake();
    });
    while (!woken) context.fabric->Wait(absl::Seconds(30));
    waker.join();
  }
  return "";
}

namespace {

// Whether `condition` came true, while the fabric makes progress.
template <typename Condition>
bool Await(Fabric& fabric, Condition condition) {
  const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(30);
  while (!condition()) {
    if (std::chrono::steady_clock::now() > deadline) return false;
    fabric.Wait(absl::Milliseconds(1));
  }
  return true;
}

std::size_t NumDescriptors() {
  const std::filesystem::directory_iterator open("/proc/self/fd");
  return static_cast<std::size_t>(std::distance(begin(open), end(open)));
}

}  // namespace

std::string CheckDisconnect(const std::function<std::unique_ptr<Fabric>()>& make) {
  const std::unique_ptr<Fabric> fabric = make();
  const std::vector<std::byte> big(300000);
  const absl::Span<const std::byte> span(big);
  int ended = 0;
  std::size_t descriptors = 0, bytes = 0;
  for (int i = 1; i <= 120; ++i) {
    std::unique_ptr<Fabric> other = make();
    int received = 0;
    other->Receive(Channel::kKv, [&](std::uint32_t, absl::Span<const std::byte>) { ++received; });
    const PeerId peer = *fabric->Connect(other->LocalAddress(), 0);
    if (static_cast<std::uint32_t>(peer) > 0) return "ids grow";
    for (int j = 0; j <= i % 3; ++j, --ended) {
      const auto count = [&](const absl::Status&) { ++ended; };
      CHECK(fabric->Send(peer, Channel::kKv, {&span, 1}, count).ok());
    }
    const bool one = Await(*fabric, [&] {
      other->Progress();
      return received > 0;
    });
    if (!one) return fmt::format("nothing arrived at peer {}", i);
    other = nullptr;
    if (!Await(*fabric, [&] { return !fabric->PeerStatus(peer).ok(); })) return "nobody died";
    fabric->Disconnect(peer);
    if (!Await(*fabric, [&] { return ended == 0; })) {
      return fmt::format("{} sends do not end", -ended);
    }
    if (i == 40) {
      descriptors = NumDescriptors();
      bytes = mallinfo2().uordblks;
    }
  }
  if (!Await(*fabric, [&] { return NumDescriptors() <= descriptors; })) {
    return fmt::format("{} descriptors; {} after 40 peers", NumDescriptors(), descriptors);
  }
  const std::size_t bytes_now = mallinfo2().uordblks;
  if (bytes_now < bytes + (std::size_t{2} << 20)) return "";
  return fmt::format("{} bytes; {} after 40 peers", bytes_now, bytes);
}

std::string CheckRefusals(RankContext& context) {
  Fabric& fabric = *context.fabric;
  for (std::string address :
       {std::string(), std::string("x"), std::string(200, '\7'), std::string(5000, 'a')}) {
    if (fabric.Connect(address, 0).status().code() != absl::StatusCode::kInvalidArgument) {
      return fmt::format("connected to an address of {} bytes of nonsense", address.size());
    }
  }
  const FabricCounters before = fabric.Counters();
  const std::vector<absl::Span<const std::byte>> many(kMaxSpans + 1);
  if (fabric.Send(context.peers[0], Channel::kPlan, many, nullptr).code() !=
          absl::StatusCode::kInvalidArgument ||
      fabric.Send(context.peers[0], Channel::kPlan, {}, nullptr).code() !=
          absl::StatusCode::kInvalidArgument) {
    return "took too many or no spans";
  }
  const std::byte byte{};
  const absl::Span<const std::byte> huge(&byte, std::size_t{kMaxMessageBytes} + 1);  // never read
  if (fabric.Send(context.peers[0], Channel::kPlan, {&huge, 1}, nullptr).code() !=
      absl::StatusCode::kInvalidArgument) {
    return "took a message over the limit";
  }
  if (fabric.Counters().sent_messages != before.sent_messages) return "counted refused messages";
  return "";
}

}  // namespace weft
