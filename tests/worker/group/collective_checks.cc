#include "tests/worker/group/collective_checks.h"

#include <chrono>
#include <cstring>
#include <random>
#include <thread>
#include <vector>

#include "fmt/format.h"
#include "kernels/device/buffer.h"

namespace weft {
namespace {

constexpr std::int64_t kMaxBytes = 1 << 20;
constexpr int kWindowOffset = 64;  // floats: how far apart ranks may use their windows

enum class Op { kAllReduce, kAllGather, kReduceScatter, kAllToAll, kGather };
constexpr const char* kOpNames[] = {"AllReduceSum", "AllGather", "ReduceScatterSum", "AllToAll",
                                    "Gather"};

// What rank `r` puts into call number `call`, known to all. Magnitudes differ so much that the
// order of a sum shows in its bits.
float Value(std::uint64_t seed, int call, int rank, std::int64_t i) {
  std::uint64_t x = seed + 1000003ULL * static_cast<std::uint64_t>(call) +
                    7919ULL * static_cast<std::uint64_t>(rank) + static_cast<std::uint64_t>(i);
  x = (x ^ (x >> 30)) * 0xbf58476d1ce4e5b9ULL;
  x = (x ^ (x >> 27)) * 0x94d049bb133111ebULL;
  x ^= x >> 31;
  const float unit = static_cast<float>(static_cast<std::int32_t>(x)) * 0x1p-31F;
  return (x >> 40) % 4 == 0 ? unit * 1e6F : unit;
}

class Checker {
 public:
  Checker(RankContext& context, std::uint64_t seed)
      : context_(context),
        seed_(seed),
        n_(static_cast<int>(context.peers.size())),
        random_(seed * 31 + static_cast<std::uint64_t>(context.rank)),
        communicator_(
            context.MakeCommunicator({.id = 7, .max_bytes = kMaxBytes, .progress = &progress_})),
        in_window_(*communicator_->Allocate(kMaxBytes + kWindowOffset * 4, stream_)),
        out_window_(*communicator_->Allocate(kMaxBytes + kWindowOffset * 4, stream_)) {}

  std::string Run() {
    std::mt19937_64 shared(seed_);  // the same calls on every rank
    for (std::int64_t count : {0L, 1L, 3L, 17L, 1991L, 1992L, 1993L, 8191L, 20000L, 70001L}) {
      for (int variant = 0; variant < 4; ++variant) {
        in_place_ = variant % 2 == 0;
        in_windows_ = variant < 2;
        for (int op = 0; op < 5; ++op) {
          if (std::string error = Call(static_cast<Op>(op), count); !error.empty()) return error;
        }
      }
    }
    for (int i = 0; i < 100; ++i) {
      in_place_ = shared() % 2 == 0;
      in_windows_ = shared() % 2 == 0;
      const Op op = static_cast<Op>(shared() % 5);
      const auto count = static_cast<std::int64_t>(shared() % (shared() % 8 == 0 ? 40000 : 3000));
      if (std::string error = Call(op, count); !error.empty()) return error;
    }
    if (progress_ != communicator_->Counters().operations) return "progress does not count calls";
    return "";
  }

 private:
  // `count` floats a rank.
  std::string Call(Op op, std::int64_t count) {
    ++call_;
    if (random_() % 16 == 0)
      std::this_thread::sleep_for(std::chrono::microseconds(random_() % 500));
    if (op != Op::kAllReduce && count * n_ * 4 > kMaxBytes) count = kMaxBytes / n_ / 4;
    const std::uint64_t before = communicator_->Counters().received_bytes;
    std::vector<float> expected;
    std::vector<float> out;
    const absl::Status status = Make(op, count, &out, &expected);
    const std::string what =
        fmt::format("seed {} call {} {} of {} floats on rank {} of {}", seed_, call_,
                    kOpNames[static_cast<int>(op)], count, context_.rank, n_);
    if (!status.ok()) return what + ": " + status.ToString();
    if (out.size() != expected.size() ||
        (!out.empty() && std::memcmp(out.data(), expected.data(), out.size() * 4) != 0)) {
      return what + ": wrong result";
    }
    const std::uint64_t received = communicator_->Counters().received_bytes - before;
    const auto others = static_cast<std::uint64_t>(n_ - 1);
    const std::uint64_t formula = others * static_cast<std::uint64_t>(count) * 4;
    if (op == Op::kGather && context_.rank != 0) {
      if (received != 0) return what + ": received bytes in a gather";
    } else if (op != Op::kAllReduce && received != formula) {
      return fmt::format("{}: received {} bytes, not {}", what, received, formula);
    }
    return "";
  }

  absl::Status Make(Op op, std::int64_t count, std::vector<float>* out,
                    std::vector<float>* expected) {
    const int me = context_.rank;
    const auto total = static_cast<std::size_t>(op == Op::kAllReduce ? count : count * n_);
    // What rank r brings: `count` floats, or `count` for each rank.
    const auto sum = [&](std::int64_t i) {
      float s = Value(seed_, call_, 0, i);
      for (int r = 1; r < n_; ++r) s += Value(seed_, call_, r, i);
      return s;
    };
    std::vector<float> values(total);
    for (std::size_t i = 0; i < total; ++i) {
      values[i] = Value(seed_, call_, me, static_cast<std::int64_t>(i));
    }
    // Memory that a rank gets from the communicator may not start where another's does.
    const int offset = me * 16 % kWindowOffset;
    float* const in = in_windows_ ? in_window_.as<float>() + offset : values.data();
    if (in_windows_) std::copy(values.begin(), values.end(), in);
    std::vector<float> results(total);
    float* const to = in_windows_ ? out_window_.as<float>() + offset : results.data();
    const auto take = [&](const float* from, std::int64_t floats, const absl::Status& status) {
      out->assign(from, from + floats);
      return status;
    };
    switch (op) {
      case Op::kAllReduce:
        for (std::int64_t i = 0; i < count; ++i) expected->push_back(sum(i));
        return take(in, count, communicator_->AllReduceSum(in, count, DType::kFloat32, stream_));
      case Op::kAllGather:
      case Op::kGather:
        for (int r = 0; r < n_; ++r) {
          for (std::int64_t i = 0; i < count; ++i) expected->push_back(Value(seed_, call_, r, i));
        }
        if (op == Op::kAllGather) {
          float* const own = in_place_ ? to + me * count : in;
          if (in_place_) std::copy_n(in, count, own);
          return take(to, count * n_, communicator_->AllGather(own, to, count * 4, stream_));
        }
        if (me != 0) expected->clear();
        return take(to, me == 0 ? count * n_ : 0,
                    communicator_->Gather(in, me == 0 ? to : nullptr, count * 4, stream_));
      case Op::kReduceScatter: {
        for (std::int64_t i = 0; i < count; ++i) expected->push_back(sum(me * count + i));
        float* const sums = in_place_ ? in + me * count : to;
        return take(sums, count,
                    communicator_->ReduceScatterSum(in, sums, count, DType::kFloat32, stream_));
      }
      case Op::kAllToAll:
        for (int r = 0; r < n_; ++r) {
          for (std::int64_t i = 0; i < count; ++i) {
            expected->push_back(Value(seed_, call_, r, me * count + i));
          }
        }
        return take(to, count * n_, communicator_->AllToAll(in, to, count * 4, stream_));
    }
    return absl::InternalError("no such operation");
  }

  RankContext& context_;
  const std::uint64_t seed_;
  const int n_;
  std::mt19937_64 random_;
  std::atomic<std::uint64_t> progress_{0};
  const std::unique_ptr<Communicator> communicator_;
  NoStream stream_;
  const kernels::Buffer in_window_;
  const kernels::Buffer out_window_;
  bool in_place_ = false;
  bool in_windows_ = false;  // memory of the communicator
  int call_ = 0;
};

}  // namespace

std::string CheckCollectives(RankContext& context, std::uint64_t seed) {
  return Checker(context, seed).Run();
}

}  // namespace weft
