#include "worker/group/frame_assembler.h"

#include <algorithm>
#include <cstring>
#include <deque>
#include <random>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/log.h"
#include "worker/group/message_ring.h"
#include "worker/group/rank_order_sum.h"

namespace weft {
namespace {

using ::testing::ElementsAre;
using ::testing::IsEmpty;

using Bytes = std::vector<std::byte>;

class Recorder : public FrameAssembler::Sink {
 public:
  struct Message {
    std::uint32_t from_tag;
    std::uint8_t channel;
    Bytes payload;
    bool operator==(const Message&) const = default;
  };
  void OnMessage(const FrameHeader& header, absl::Span<const std::byte> payload) override {
    EXPECT_EQ(reinterpret_cast<std::uintptr_t>(payload.data()) % 8, 0);
    messages.push_back({header.from_tag, header.channel, {payload.begin(), payload.end()}});
  }
  std::vector<Message> messages;
};

// The frames a sender makes of messages.
class Sender {
 public:
  explicit Sender(std::uint64_t connection, std::int64_t max_payload_bytes = kWholeMessageBytes)
      : connection_(connection), max_payload_bytes_(static_cast<std::size_t>(max_payload_bytes)) {}

  std::vector<Bytes> Frames(const Bytes& message, std::uint8_t channel) {
    std::vector<Bytes> frames;
    for (std::size_t at = 0; frames.empty() || at < message.size();) {
      const std::size_t n = std::min(message.size() - at, max_payload_bytes_);
      const FrameHeader header = {.magic = kFrameMagic,
                                  .from_tag = 9,
                                  .connection = connection_,
                                  .sequence = sequence_++,
                                  .channel = channel,
                                  .reserved = {},
                                  .message_bytes = message.size()};
      Bytes frame(sizeof(header) + n);
      std::memcpy(frame.data(), &header, sizeof(header));
      std::copy_n(message.begin() + static_cast<std::ptrdiff_t>(at), n,
                  frame.begin() + sizeof(header));
      frames.push_back(std::move(frame));
      at += n;
    }
    return frames;
  }

  void set_sequence(std::uint32_t sequence) { sequence_ = sequence; }

 private:
  const std::uint64_t connection_;
  const std::size_t max_payload_bytes_;
  std::uint32_t sequence_ = 0;
};

Bytes RandomBytes(std::mt19937& random, std::size_t size) {
  Bytes bytes(size);
  for (std::byte& b : bytes) b = static_cast<std::byte>(random());
  return bytes;
}

TEST(FrameAssemblerTest, AnyOrderOfArrivalGivesTheOrderOfSending) {
  for (unsigned seed = 0; seed < 30; ++seed) {
    std::mt19937 random(seed);
    Recorder recorder;
    const std::int64_t frame = seed % 2 == 0 ? kWholeMessageBytes : kLongFramePayloadBytes;
    FrameAssembler assembler(recorder, /*key=*/0, frame);
    Sender sender(seed + 1, frame);
    const auto whole = static_cast<std::size_t>(frame);
    std::vector<Recorder::Message> expected;
    std::vector<Bytes> frames;
    for (int i = 0; i < 20; ++i) {
      const std::size_t sizes[] = {0,     random() % 100, whole - 1,
                                   whole, whole + 1,      random() % 60000};
      Bytes message = RandomBytes(random, sizes[random() % 6]);
      const auto channel = static_cast<std::uint8_t>(random() % kNumChannels);
      for (Bytes& frame : sender.Frames(message, channel)) frames.push_back(std::move(frame));
      expected.push_back({9, channel, std::move(message)});
    }
    std::shuffle(frames.begin(), frames.end(), random);
    for (const Bytes& frame : frames) {
      // At any alignment.
      Bytes shifted(frame.size() + 8);
      const std::size_t shift = random() % 8;
      std::copy(frame.begin(), frame.end(), shifted.begin() + static_cast<std::ptrdiff_t>(shift));
      assembler.Accept(absl::MakeConstSpan(shifted).subspan(shift, frame.size()));
    }
    EXPECT_EQ(recorder.messages == expected, true) << "seed " << seed;
    EXPECT_EQ(assembler.bad_frames(), 0);
  }
}

TEST(FrameAssemblerTest, DropsWhatMakesNoSenseAndKeepsTheRest) {
  Recorder recorder;
  FrameAssembler assembler(recorder);
  Sender sender(5);
  std::mt19937 random(1);
  const Bytes small = RandomBytes(random, 10);
  const Bytes good = sender.Frames(small, 1)[0];
  const auto with = [&](auto change) {
    FrameHeader header;
    Bytes frame = good;
    std::memcpy(&header, frame.data(), sizeof(header));
    change(header);
    std::memcpy(frame.data(), &header, sizeof(header));
    return frame;
  };
  assembler.Accept({});
  assembler.Accept(absl::MakeConstSpan(good).first(sizeof(FrameHeader) - 1));
  assembler.Accept(with([](FrameHeader& h) { h.magic ^= 1; }));
  assembler.Accept(with([](FrameHeader& h) { h.key ^= 1; }));
  assembler.Accept(with([](FrameHeader& h) { h.channel = kNumChannels; }));
  assembler.Accept(with([](FrameHeader& h) { h.message_bytes = std::uint64_t{1} << 60; }));
  assembler.Accept(with([](FrameHeader& h) { h.sequence = 1 << 30; }));
  assembler.Accept(Bytes(kFrameBytes + 1, good[0]));
  EXPECT_EQ(assembler.bad_frames(), 8);
  EXPECT_THAT(recorder.messages, IsEmpty());
  assembler.Accept(good);
  assembler.Accept(good);  // a duplicate
  EXPECT_EQ(assembler.bad_frames(), 9);
  EXPECT_THAT(recorder.messages, ElementsAre(Recorder::Message{9, 1, small}));
}

TEST(FrameAssemblerTest, RandomlyDamagedFramesNeitherCrashNorHurtOtherSenders) {
  spdlog::set_level(spdlog::level::err);
  for (unsigned seed = 0; seed < 200; ++seed) {
    std::mt19937 random(seed);
    Recorder recorder;
    FrameAssembler assembler(recorder);
    Sender bad(1);
    Sender honest(2);
    std::vector<Bytes> sent;
    for (int i = 0; i < 20; ++i) {
      for (Bytes frame : bad.Frames(RandomBytes(random, random() % 20000), 2)) {
        for (unsigned flips = random() % 4; flips > 0; --flips) {
          // Not the connection: that would make it another sender.
          std::size_t at = random() % 24;
          if (at >= 8) at += 8;
          frame[at] ^= static_cast<std::byte>(1U << (random() % 8));
        }
        if (random() % 4 == 0) frame.resize(random() % (frame.size() + 1));
        assembler.Accept(frame);
      }
      sent.push_back(RandomBytes(random, random() % 20000));
      for (const Bytes& frame : honest.Frames(sent.back(), 3)) assembler.Accept(frame);
    }
    std::vector<Bytes> received;
    for (const Recorder::Message& m : recorder.messages) {
      if (m.from_tag == 9 && m.channel == 3) received.push_back(m.payload);
    }
    // Damage may turn the bad sender's channel into 3 as well.
    for (const Bytes& message : sent) {
      EXPECT_TRUE(std::find(received.begin(), received.end(), message) != received.end())
          << "seed " << seed;
    }
  }
}

TEST(FrameAssemblerTest, ForgetsTheLongestUnusedOfTooManyConnections) {
  Recorder recorder;
  FrameAssembler assembler(recorder);
  Sender first(1);
  assembler.Accept(first.Frames({}, 0)[0]);
  for (std::uint64_t connection = 2; connection < 3000; ++connection) {
    assembler.Accept(Sender(connection).Frames({}, 0)[0]);
    if (connection % 500 == 0) assembler.Accept(first.Frames({}, 0)[0]);
  }
  EXPECT_EQ(recorder.messages.size(), 2999 + 5);
  EXPECT_EQ(assembler.early_frames(), 0);
}

TEST(MessageRingTest, IsAQueueUntilItIsFull) {
  for (unsigned seed = 0; seed < 50; ++seed) {
    std::mt19937 random(seed);
    MessageRing ring(4000);
    std::deque<std::pair<std::uint64_t, Bytes>> model;
    std::size_t used = 0;
    for (int i = 0; i < 5000; ++i) {
      if (random() % 2 == 0) {
        const Bytes payload = RandomBytes(random, random() % 600);
        const CollectiveHeader header = {.offset = static_cast<std::uint64_t>(i)};
        const std::size_t need = MessageRing::BytesOf(payload.size());
        const bool pushed = ring.Push(header, payload);
        // Wrapping around wastes less than the message that did not fit.
        constexpr std::size_t kLargest = MessageRing::BytesOf(599);
        if (used + need + kLargest <= 4000 && used + 2 * need <= 4000) {
          ASSERT_TRUE(pushed) << "seed " << seed;
        }
        if (used + need > 4000) {
          ASSERT_FALSE(pushed) << "seed " << seed;
        }
        if (pushed) {
          model.emplace_back(i, payload);
          used += need;
        }
      } else if (const auto front = ring.Front(); front.has_value()) {
        ASSERT_FALSE(model.empty()) << "seed " << seed;
        ASSERT_EQ(front->header.offset, model.front().first) << "seed " << seed;
        ASSERT_TRUE(std::ranges::equal(front->payload, model.front().second)) << "seed " << seed;
        used -= MessageRing::BytesOf(front->payload.size());
        ring.Pop();
        model.pop_front();
      } else {
        ASSERT_TRUE(model.empty()) << "seed " << seed;
      }
    }
  }
}

TEST(RankOrderSumTest, EqualsAPlainLoopBitForBit) {
  std::mt19937 random(1);
  std::uniform_real_distribution<float> values(-1e4F, 1e4F);
  for (std::size_t num_parts : {1, 2, 3, 5, 8}) {
    for (std::int64_t count : {0, 1, 7, 8, 31, 32, 33, 100, 1000}) {
      std::vector<std::vector<float>> data(num_parts);
      std::vector<const float*> parts;
      for (std::vector<float>& part : data) {
        for (std::int64_t i = 0; i < count + 1; ++i) part.push_back(values(random));
        parts.push_back(part.data() + 1);  // unaligned
      }
      std::vector<float> expected;
      for (std::int64_t i = 0; i < count; ++i) {
        float sum = parts[0][i];
        for (std::size_t p = 1; p < num_parts; ++p) sum += parts[p][i];
        expected.push_back(sum);
      }
      float* const out = data[num_parts / 2].data() + 1;  // in place
      RankOrderSum(parts, count, out);
      EXPECT_TRUE(expected.empty() ||
                  std::memcmp(out, expected.data(), expected.size() * sizeof(float)) == 0);
    }
  }
}

}  // namespace
}  // namespace weft
