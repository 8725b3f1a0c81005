#include "worker/group/communicator.h"

#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/base/log.h"
#include "tests/worker/group/collective_checks.h"
#include "tests/worker/group/rank_processes.h"
#include "worker/group/collective_mux.h"
#include "worker/group/collective_rounds.h"
#include "worker/group/shared_windows.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::Each;
using ::testing::HasSubstr;
using ::testing::IsEmpty;

std::string Text(const absl::Status& status) { return status.ok() ? "" : status.ToString(); }

TEST(CommunicatorTest, EveryCollectiveEqualsBruteForce) {
  for (int n = 1; n <= 5; ++n) {
    const auto seed = static_cast<std::uint64_t>(n);
    EXPECT_THAT(RunOnThreads(n, [&](RankContext& c) { return CheckCollectives(c, seed); }),
                Each(IsEmpty()));
  }
}

TEST(CommunicatorTest, OneRankAloneCopies) {
  NoStream stream;
  const std::unique_ptr<Communicator> self = MakeSelfCommunicator();
  EXPECT_EQ(self->size(), 1);
  float data[2] = {1, 2};
  float out[2] = {};
  EXPECT_TRUE(self->AllReduceSum(data, 2, DType::kFloat32, stream).ok());
  EXPECT_TRUE(self->AllGather(data, out, sizeof(data), stream).ok());
  EXPECT_THAT(out, testing::ElementsAre(1, 2));
  data[0] = 3;
  EXPECT_TRUE(self->ReduceScatterSum(data, out, 2, DType::kFloat32, stream).ok());
  EXPECT_THAT(out, testing::ElementsAre(3, 2));
  EXPECT_EQ(self->Counters().operations, 3);
  EXPECT_EQ(self->Counters().received_bytes, 0);
  self->Abort();
  EXPECT_EQ(self->Gather(data, out, 8, stream).code(), absl::StatusCode::kAborted);
}

TEST(CommunicatorTest, RefusesWhatItCannotDoAndWorksAfterwards) {
  EXPECT_THAT(
      RunOnThreads(
          2,
          [](RankContext& c) -> std::string {
            NoStream stream;
            const auto communicator = c.MakeCommunicator({.id = 1, .max_bytes = 64});
            std::vector<float> in(32);
            std::vector<float> out(32);
            const auto refused = [](const absl::Status& status, absl::StatusCode code) {
              return status.code() == code;
            };
            constexpr auto kInvalid = absl::StatusCode::kInvalidArgument;
            Communicator& g = *communicator;
            for (const std::int64_t bytes : {33L, -1L, std::int64_t{1} << 62}) {
              if (!refused(g.AllGather(in.data(), out.data(), bytes, stream), kInvalid) ||
                  !refused(g.AllToAll(in.data(), out.data(), bytes, stream), kInvalid) ||
                  !refused(g.Gather(in.data(), out.data(), bytes, stream), kInvalid)) {
                return fmt::format("took {} bytes", bytes);
              }
            }
            if (!refused(g.AllReduceSum(in.data(), 17, DType::kFloat32, stream), kInvalid) ||
                !refused(g.ReduceScatterSum(in.data(), out.data(), 9, DType::kFloat32, stream),
                         kInvalid)) {
              return "took too many floats";
            }
            if (!refused(g.AllReduceSum(in.data(), 1, DType::kBFloat16, stream),
                         absl::StatusCode::kUnimplemented)) {
              return "took bfloat16";
            }
            if (g.Counters().operations != 0) return "counted refused calls";
            // Exactly the limit.
            if (std::string e = Text(g.AllGather(in.data(), out.data(), 32, stream)); !e.empty()) {
              return e;
            }
            return Text(g.AllReduceSum(in.data(), 16, DType::kFloat32, stream));
          }),
      Each(IsEmpty()));
}

TEST(CommunicatorTest, DifferentCallsAreAnErrorThatNamesBoth) {
  const auto run = [](auto call_of_rank_0, auto call_of_rank_1) {
    return RunOnThreads(2, [&](RankContext& c) -> std::string {
      const auto communicator = c.MakeCommunicator({.id = 3, .max_bytes = 4096});
      std::vector<float> in(1024);
      std::vector<float> out(1024);
      absl::Status status = c.rank == 0 ? call_of_rank_0(*communicator, in.data(), out.data())
                                        : call_of_rank_1(*communicator, in.data(), out.data());
      return status.ToString();
    });
  };
  static NoStream stream;
  const auto reduce = [](int count) {
    return [count](Communicator& c, float* in, float*) {
      return c.AllReduceSum(in, count, DType::kFloat32, stream);
    };
  };
  const auto gather_all = [](Communicator& c, float* in, float* out) {
    return c.AllGather(in, out, 40, stream);
  };
  EXPECT_THAT(run(reduce(10), gather_all),
              Each(AllOf(HasSubstr("INTERNAL"), HasSubstr("AllReduceSum of 40 bytes"),
                         HasSubstr("AllGather of 40 bytes"))));
  EXPECT_THAT(
      run(reduce(10), reduce(11)),
      Each(AllOf(HasSubstr("INTERNAL"), HasSubstr("of 40 bytes"), HasSubstr("of 44 bytes"))));
  EXPECT_THAT(run(reduce(0), reduce(1)), Each(HasSubstr("INTERNAL")));
  // Rank 1 does not wait in a gather, and finds out in its next call.
  const auto gather_then_reduce = [](Communicator& c, float* in, float* out) {
    absl::Status status = c.Gather(in, out, 40, stream);
    return status.ok() ? c.AllReduceSum(in, 10, DType::kFloat32, stream) : status;
  };
  EXPECT_THAT(run(reduce(10), gather_then_reduce),
              Each(AllOf(HasSubstr("INTERNAL"), HasSubstr("AllReduceSum"))));
}

TEST(CommunicatorTest, SeveralCommunicatorsShareAFabric) {
  // World of 4 with two pairs, as in tensor and context parallel groups; each rank makes its
  // communicators at another time, and the pairs drift apart.
  EXPECT_THAT(
      RunOnThreads(4,
                   [](RankContext& c) -> std::string {
                     NoStream stream;
                     std::mt19937 random(static_cast<unsigned>(c.rank));
                     const auto nap = [&] {
                       std::this_thread::sleep_for(std::chrono::microseconds(random() % 800));
                     };
                     nap();
                     const auto world = c.MakeCommunicator({.id = 0, .max_bytes = 1 << 16});
                     const int base = c.rank / 2 * 2;
                     // The first message to the pair may come before the pair is made.
                     float one[4] = {1, 1, 1, 1};
                     if (c.rank % 2 == 1) {
                       nap();
                       c.fabric->Progress();
                     }
                     const auto pair = MakeFabricCommunicator(
                         c.mux, c.rank % 2, {&c.peers[static_cast<std::size_t>(base)], 2},
                         {&c.tags[static_cast<std::size_t>(base)], 2},
                         {.id = 1, .max_bytes = 1 << 16});
                     for (int i = 0; i < 200; ++i) {
                       float in = static_cast<float>(c.rank);
                       float pairs[2];
                       if (auto s = pair->AllGather(&in, pairs, 4, stream); !s.ok()) {
                         return s.ToString();
                       }
                       if (pairs[0] + 1 != pairs[1]) return "wrong pair";
                       if (i % 8 == c.rank) nap();
                       if (i % 5 != 0) continue;
                       std::fill_n(one, 4, 1.0F);
                       if (auto s = world->AllReduceSum(one, 4, DType::kFloat32, stream); !s.ok()) {
                         return s.ToString();
                       }
                       if (one[3] != 4) return "wrong sum";
                     }
                     return "";
                   }),
      Each(IsEmpty()));
}

TEST(CommunicatorTest, GathersInARowDoNotOverrunASlowRoot) {
  EXPECT_THAT(
      RunOnThreads(
          3,
          [](RankContext& c) -> std::string {
            NoStream stream;
            constexpr std::int64_t kBytes = 20000;
            const auto communicator = c.MakeCommunicator({.id = 1, .max_bytes = 3 * kBytes});
            std::vector<std::uint8_t> in(kBytes);
            std::vector<std::uint8_t> out(3 * kBytes);
            for (int i = 0; i < 50; ++i) {
              if (c.rank == 0) std::this_thread::sleep_for(std::chrono::milliseconds(1));
              std::fill(in.begin(), in.end(), static_cast<std::uint8_t>(i + c.rank));
              if (auto s = communicator->Gather(in.data(), out.data(), kBytes, stream); !s.ok()) {
                return s.ToString();
              }
              for (int r = 0; c.rank == 0 && r < 3; ++r) {
                if (out[static_cast<std::size_t>((r + 1) * kBytes - 1)] != i + r) {
                  return fmt::format("gather {}: wrong part of rank {}", i, r);
                }
              }
              float f = 1;
              if (i % 3 == 0) {
                if (auto s = communicator->AllReduceSum(&f, 1, DType::kFloat32, stream); !s.ok()) {
                  return s.ToString();
                }
              }
            }
            return "";
          }),
      Each(IsEmpty()));
}

constexpr std::int64_t kLongBytes = 1 << 20;

// What comes over the fabric for an all-gather of 1 MiB each that all ranks take from their
// communicator. Rank 0 asks for `first_bytes` there.
std::vector<std::string> GatherFromWindows(std::int64_t first_bytes,
                                           std::uint64_t most_fabric_bytes) {
  return RunOnThreads(3, [=](RankContext& c) -> std::string {
    NoStream stream;
    const auto communicator = c.MakeCommunicator({.id = 1, .max_bytes = 3 * kLongBytes});
    const kernels::Buffer in =
        *communicator->Allocate(c.rank == 0 ? first_bytes : kLongBytes, stream);
    std::vector<std::uint8_t> out(3 * kLongBytes);
    std::fill_n(in.data(), kLongBytes, static_cast<std::byte>(c.rank + 1));
    if (auto s = communicator->AllGather(in.data(), out.data(), kLongBytes, stream); !s.ok()) {
      return s.ToString();
    }
    for (std::int64_t i = 0; i < 3 * kLongBytes; ++i) {
      if (out[static_cast<std::size_t>(i)] != i / kLongBytes + 1) return "wrong bytes";
    }
    if (communicator->Counters().received_bytes != 2 * kLongBytes) return "wrong count";
    const std::uint64_t bytes = c.fabric->Counters().received_bytes;
    return bytes <= most_fabric_bytes ? "" : fmt::format("{} bytes over the fabric", bytes);
  });
}

TEST(CommunicatorTest, LongInputsInItsMemoryAreReadWhereTheyLie) {
  EXPECT_THAT(GatherFromWindows(kLongBytes, 4096), Each(IsEmpty()));
}

TEST(CommunicatorTest, ARankWithOtherWindowsIsSentEverything) {
  spdlog::set_level(spdlog::level::err);  // here: ThreadSanitizer does not see spdlog made
  EXPECT_THAT(GatherFromWindows(kLongBytes + 64, 4 * kLongBytes), Each(IsEmpty()));
  EXPECT_THAT(GatherFromWindows(kLongBytes + 64, 4096), Each(HasSubstr("over the fabric")));
}

TEST(CommunicatorTest, InputsInSomeRanksWindowsOnlyAreAnError) {
  EXPECT_THAT(RunOnThreads(2,
                           [](RankContext& c) -> std::string {
                             NoStream stream;
                             const auto communicator =
                                 c.MakeCommunicator({.id = 1, .max_bytes = 2 * kLongBytes});
                             const kernels::Buffer window =
                                 *communicator->Allocate(kLongBytes, stream);
                             std::vector<std::byte> other(kLongBytes);
                             std::vector<std::byte> out(2 * kLongBytes);
                             return communicator
                                 ->AllGather(c.rank == 0 ? window.data() : other.data(), out.data(),
                                             kLongBytes, stream)
                                 .ToString();
                           }),
              Each(AllOf(HasSubstr("INTERNAL"), HasSubstr("AllGather"))));
}

// Rank 1 of two, played by hand, beside a communicator of rank 0.
class PlayedPeer {
 public:
  PlayedPeer()
      : to_other_(*fabric_->Connect(other_->LocalAddress(), 0)),
        to_us_(*other_->Connect(fabric_->LocalAddress(), 1)),
        communicator_(MakeFabricCommunicator(MakeCollectiveMux(*fabric_), 0,
                                             std::vector{to_other_, to_other_}, {0, 1},
                                             {.id = 1, .max_bytes = 2 * kLongBytes})),
        window_(*communicator_->Allocate(kLongBytes, stream_)),
        their_window_(*windows_.Allocate(kLongBytes)) {
    other_->Receive(Channel::kCollective,
                    [this](std::uint32_t, absl::Span<const std::byte> message) {
                      CollectiveHeader header;
                      std::memcpy(&header, message.data(), sizeof(header));
                      heard_.push_back(static_cast<Operation>(header.operation));
                    });
    Send(kMeetWindows, 0, windows_.handles());
    Send(kMeetWindows, 1, std::uint64_t{1});
  }

  template <typename... Word>
  void Send(Operation operation, std::int64_t bytes, const Word&... word) {
    const CollectiveHeader header = {.communicator = 1,
                                     .round = round_++,
                                     .operation = operation,
                                     .reserved = 0,
                                     .operation_bytes = static_cast<std::uint64_t>(bytes),
                                     .offset = 0};
    const absl::Span<const std::byte> spans[] = {
        {reinterpret_cast<const std::byte*>(&header), sizeof(header)},
        {reinterpret_cast<const std::byte*>(&word), sizeof(word)}...};
    ASSERT_TRUE(other_->Send(to_us_, Channel::kCollective, spans, nullptr).ok());
  }
  // Waits until rank 0 says `operation`.
  void Hear(Operation operation) {
    const auto deadline = std::chrono::steady_clock::now() + std::chrono::seconds(10);
    while (std::find(heard_.begin(), heard_.end(), operation) == heard_.end()) {
      ASSERT_LT(std::chrono::steady_clock::now(), deadline) << "never said " << operation;
      other_->Wait(absl::Milliseconds(10));
    }
  }

  // Rank 0 makes `call` on a thread of its own.
  template <typename Call>
  void Start(const Call& call) {
    rank_0_ = std::thread([this, call] {
      status_ = call();
      returned_ = true;
    });
  }
  // Rank 0's call of `bytes` returns once rank 1 has left it, too, and not before.
  void ExpectReturnsOnceLeft(std::int64_t bytes) {
    Hear(kLeaveShared);
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    EXPECT_FALSE(returned_);
    Send(kLeaveShared, bytes);
    rank_0_.join();
    EXPECT_TRUE(status_.ok()) << status_;
  }

  Communicator& communicator() { return *communicator_; }
  NoStream& stream() { return stream_; }
  float* window() { return window_.as<float>(); }              // rank 0's
  float* their_window() { return their_window_.as<float>(); }  // rank 1's

 private:
  NoStream stream_;
  std::unique_ptr<Fabric> fabric_ = MakeLocalFabric("us");
  std::unique_ptr<Fabric> other_ = MakeLocalFabric("peer");
  PeerId to_other_;
  PeerId to_us_;
  SharedWindows windows_{2};
  std::unique_ptr<Communicator> communicator_;
  kernels::Buffer window_;
  kernels::Buffer their_window_;
  std::vector<Operation> heard_;
  std::thread rank_0_;
  absl::Status status_;
  std::atomic<bool> returned_ = false;
  std::uint32_t round_ = 0;
};

TEST(CommunicatorTest, APlaceOutsideOfWindowsIsAnError) {
  for (const SharedWindows::Place place :
       {SharedWindows::Place{1, 0}, SharedWindows::Place{0, 64}, SharedWindows::Place{0, ~0ULL},
        SharedWindows::Place{~0ULL, 0}}) {
    PlayedPeer peer;
    peer.Send(kSharedAllGather, kLongBytes, place);
    std::vector<std::byte> out(2 * kLongBytes);
    const absl::Status status =
        peer.communicator().AllGather(peer.window(), out.data(), kLongBytes, peer.stream());
    EXPECT_THAT(status.ToString(),
                AllOf(HasSubstr("INTERNAL: rank 1 has 1048576 bytes at"), HasSubstr("of window")));
    EXPECT_EQ(peer.communicator().AllGather(peer.window(), out.data(), 0, peer.stream()), status);
  }
}

// Until all have read it, a call does not return, and its caller writes nothing.
TEST(CommunicatorTest, AnInputStaysUntilAllHaveReadIt) {
  PlayedPeer peer;
  std::vector<float> out(2 * kLongBytes / 4);
  peer.Start([&] {
    return peer.communicator().AllGather(peer.window(), out.data(), kLongBytes, peer.stream());
  });
  peer.their_window()[5] = 7;
  peer.Send(kSharedAllGather, kLongBytes, SharedWindows::Place{0, 0});
  peer.ExpectReturnsOnceLeft(kLongBytes);
  EXPECT_EQ(out[kLongBytes / 4 + 5], 7);
}

TEST(CommunicatorTest, AnAllReduceWritesAPeersPartOnceThePeerHasReadIt) {
  PlayedPeer peer;
  constexpr std::int64_t kCount = kLongBytes / 4;
  constexpr std::int64_t kTheirs = kCount / 2;  // begins rank 1's part
  std::fill_n(peer.window(), kCount, 1.0F);
  std::fill_n(peer.their_window(), kCount, 2.0F);
  peer.Start([&] {
    return peer.communicator().AllReduceSum(peer.window(), kCount, DType::kFloat32, peer.stream());
  });
  peer.Send(kSharedAllReduceScatter, kLongBytes, SharedWindows::Place{0, 0});
  peer.Hear(kSharedAllReduceGather);
  std::this_thread::sleep_for(std::chrono::milliseconds(20));
  EXPECT_EQ(peer.window()[0], 3);
  EXPECT_EQ(peer.window()[kTheirs - 1], 3);
  EXPECT_EQ(peer.window()[kTheirs], 1);  // rank 1 may not have read it yet
  std::fill_n(peer.their_window() + kTheirs, kTheirs, 4.0F);
  peer.Send(kSharedAllReduceGather, kLongBytes);
  peer.ExpectReturnsOnceLeft(kLongBytes);
  EXPECT_EQ(peer.window()[kTheirs - 1], 3);
  EXPECT_EQ(peer.window()[kTheirs], 4);
  EXPECT_EQ(peer.window()[kCount - 1], 4);
}

TEST(CommunicatorTest, AbortEndsTheRunningCallAndEveryLaterOne) {
  EXPECT_THAT(RunOnThreads(2,
                           [](RankContext& c) -> std::string {
                             if (c.rank == 1) return "ABORTED";  // never calls
                             NoStream stream;
                             const auto communicator = c.MakeCommunicator(
                                 {.id = 1, .max_bytes = 64, .stall_timeout = absl::Minutes(10)});
                             std::thread aborter([&] {
                               std::this_thread::sleep_for(std::chrono::milliseconds(20));
                               communicator->Abort();
                             });
                             float f = 1;
                             const absl::Status first =
                                 communicator->AllReduceSum(&f, 1, DType::kFloat32, stream);
                             aborter.join();
                             const absl::Status second = communicator->Gather(&f, &f, 0, stream);
                             return first == second ? first.ToString() : "not the same";
                           }),
              Each(HasSubstr("ABORTED")));
}

TEST(CommunicatorTest, ASilentPeerIsUnavailableAfterTheStallTimeout) {
  std::unique_ptr<Fabric> silent = MakeLocalFabric("silent");
  std::unique_ptr<Fabric> fabric = MakeLocalFabric("us");
  const PeerId peer = *fabric->Connect(silent->LocalAddress(), 0);
  const PeerId peers[] = {peer, peer};
  const std::uint32_t tags[] = {0, 1};
  std::atomic<std::uint64_t> progress{0};
  const auto communicator = MakeFabricCommunicator(
      MakeCollectiveMux(*fabric), 0, peers, tags,
      {.id = 1, .max_bytes = 64, .stall_timeout = absl::Milliseconds(50), .progress = &progress});
  NoStream stream;
  float f = 1;
  EXPECT_THAT(communicator->AllReduceSum(&f, 1, DType::kFloat32, stream).ToString(),
              AllOf(HasSubstr("UNAVAILABLE: nothing arrived for 50ms in AllReduceSum of 4 bytes"),
                    HasSubstr("missing are ranks [1]")));
  EXPECT_EQ(progress, 0);
  EXPECT_EQ(communicator->Counters().operations, 0);
}

TEST(CommunicatorTest, ADeadPeerIsUnavailable) {
  std::unique_ptr<Fabric> dead = MakeLocalFabric("dead");
  std::unique_ptr<Fabric> fabric = MakeLocalFabric("us");
  const PeerId peer = *fabric->Connect(dead->LocalAddress(), 0);
  const PeerId peers[] = {peer, peer};
  const std::uint32_t tags[] = {0, 1};
  const auto communicator =
      MakeFabricCommunicator(MakeCollectiveMux(*fabric), 0, peers, tags,
                             {.id = 1, .max_bytes = 64, .stall_timeout = absl::Minutes(10)});
  NoStream stream;
  std::thread killer([&] {
    std::this_thread::sleep_for(std::chrono::milliseconds(20));
    dead.reset();
  });
  EXPECT_THAT(communicator->AllGather(nullptr, nullptr, 0, stream).ToString(),
              HasSubstr("UNAVAILABLE: lost rank 1 in AllGather"));
  killer.join();
}

// Nonsense on the collective channel from a stranger does not touch a group; from a peer it is an
// error at worst. Sanitizers see the rest.
TEST(CommunicatorTest, SurvivesNonsenseOnTheWire) {
  spdlog::set_level(spdlog::level::err);
  for (unsigned seed = 0; seed < 60; ++seed) {
    const bool from_peer = seed % 2 == 0;
    std::mt19937 random(seed);
    std::unique_ptr<Fabric> fabric = MakeLocalFabric("us");
    std::unique_ptr<Fabric> other = MakeLocalFabric("peer");
    const PeerId to_other = *fabric->Connect(other->LocalAddress(), 0);
    const PeerId to_us = *other->Connect(fabric->LocalAddress(), from_peer ? 1 : 77);
    const PeerId peers[] = {to_other, to_other};
    const std::uint32_t tags[] = {0, 1};
    const auto communicator = MakeFabricCommunicator(
        MakeCollectiveMux(*fabric), 0, peers, tags,
        {.id = 1, .max_bytes = 100000, .stall_timeout = absl::Milliseconds(1)});
    const auto pick = [&random](std::vector<std::uint64_t> likely) {
      return random() % 4 == 0 ? (std::uint64_t{random()} << 32 | random())
                               : likely[random() % likely.size()];
    };
    std::vector<std::byte> payload(20000);
    for (int i = 0; i < 200; ++i) {
      const CollectiveHeader header = {
          .communicator = static_cast<std::uint32_t>(pick({1, 1, 1, 1, 2})),
          .round = static_cast<std::uint32_t>(pick({0, 0, 1, 1, 2, 3, 4, 5, ~0ULL})),
          .operation = static_cast<std::uint32_t>(
              pick({0, 1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15})),
          .reserved = 0,
          .operation_bytes = pick({0, 8000, 50000}),
          .offset = pick({0, 0, 7968, 15936, 42032})};
      const std::size_t bytes = pick({0, 1, 7968, 7968, 2064, 20000}) % payload.size();
      std::vector<std::byte> message(sizeof(header) + bytes);
      std::memcpy(message.data(), &header, sizeof(header));
      if (random() % 16 == 0) message.resize(random() % 40);
      const absl::Span<const std::byte> span = message;
      ASSERT_TRUE(other->Send(to_us, Channel::kCollective, {&span, 1}, nullptr).ok());
    }
    NoStream stream;
    std::vector<std::byte> in(50000);
    std::vector<std::byte> out(100000);
    const absl::Status status = communicator->AllGather(in.data(), out.data(), 50000, stream);
    if (from_peer) {
      EXPECT_FALSE(status.ok()) << "seed " << seed;
    } else {
      EXPECT_THAT(status.ToString(), HasSubstr("nothing arrived")) << "seed " << seed;
      EXPECT_EQ(communicator->Counters().received_bytes, 0) << "seed " << seed;
    }
  }
}

}  // namespace
}  // namespace weft
