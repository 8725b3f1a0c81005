// What KV goes from one group to another with, on this host: a rank that sends to two that share
// the positions, each with a mover and a fabric of its own, in one process. Beside it a memcpy of
// as many bytes. scripts/bench_pd.sh runs it.

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cstdio>
#include <cstring>
#include <memory>
#include <string>
#include <vector>

#include "CLI/CLI.hpp"
#include "server/base/check.h"
#include "server/base/log.h"
#include "weft/v1/worker.pb.h"
#include "worker/transfer/kv_mover.h"
#include "worker/transfer/kv_routes.h"

namespace weft {
namespace {

constexpr std::int32_t kBlockSize = 128;
constexpr HeadCounts kHeads = {.num_q_heads = 32, .num_kv_heads = 8};

double Seconds(std::chrono::steady_clock::time_point since) {
  return std::chrono::duration<double>(std::chrono::steady_clock::now() - since).count();
}

class BenchGroup {
 public:
  BenchGroup(const LayoutOptions& options, std::int64_t num_tokens, int num_layers,
             bool shared_memory)
      : num_blocks_(static_cast<std::int32_t>(num_tokens / kBlockSize)), slots_(1, num_blocks_) {
    const auto layouts = LayoutsOfGroup(options, kHeads);
    CHECK(layouts.ok());
    endpoint_.set_format("kv");
    endpoint_.set_tensor_parallel_size(options.tensor_parallel_size);
    endpoint_.set_decode_context_parallel_size(options.decode_context_parallel_size);
    endpoint_.set_block_size(kBlockSize);
    endpoint_.set_cp_kv_cache_interleave_size(*options.interleave);
    for (std::int32_t rank = 0; rank < options.tensor_parallel_size; ++rank) {
      const ShardLayout& own = (*layouts)[rank];
      kernels::CpuStream cpu(1);
      auto cache = KvCache::Create({.num_layers = num_layers,
                                    .num_kv_heads = own.GroupKvHeads().size(),
                                    .head_dim = 128,
                                    .value_dim = 128,
                                    .block_tokens_per_rank = own.block_tokens_per_rank(),
                                    .dtype = DType::kFloat16},
                                   num_blocks_, cpu);
      auto fabric = MakeUcxFabric(UcxReach::kBetweenGroups);
      CHECK(cache.ok() && fabric.ok());
      std::memset(cache->k_blocks(0), 1, static_cast<std::size_t>(cache->size_bytes()));
      bytes_ += cache->size_bytes();
      caches_.push_back(std::make_unique<KvCache>(*std::move(cache)));
      endpoint_.add_fabric_addresses((*fabric)->LocalAddress());
      const KvRank kv_rank = {.cache = caches_.back().get(),
                              .group = *layouts,
                              .rank = rank,
                              .layout = options,
                              .heads = kHeads,
                              .format = "kv"};
      movers_.push_back(std::make_unique<KvMover>(
          *std::move(fabric), kv_rank, KvMoverOptions{.shared_memory = shared_memory},
          [this](const KvReport& report) {
            CHECK_MSG(report.kind != KvReport::Kind::kFailed, report.error);
            if (report.kind != KvReport::Kind::kDone) return;
            ++num_done_;
            num_done_.notify_one();
          }));
    }
  }

  void Step(std::vector<KvOp> ops) {
    StepPlan plan;
    if (first_step_) {
      plan.table_deltas = {{.slot = 0, .num_blocks = num_blocks_}};
      for (std::int32_t i = 0; i < num_blocks_; ++i) plan.delta_blocks.push_back(i);
      slots_.Apply(plan);
      first_step_ = false;
    }
    plan.kv_ops = std::move(ops);
    for (const auto& mover : movers_) {
      mover->OnStepBegin(plan, slots_);
      mover->OnStepEnd();
    }
  }
  void WaitUntilDone() {
    const int all = static_cast<int>(movers_.size());
    for (int done = num_done_; done < all; done = num_done_) num_done_.wait(done);
    num_done_ = 0;
  }
  std::shared_ptr<const std::string> Target() const {
    v1::KvTarget target;
    *target.mutable_endpoint() = endpoint_;
    return std::make_shared<const std::string>(target.SerializeAsString());
  }
  std::int64_t bytes() const { return bytes_; }

 private:
  const std::int32_t num_blocks_;
  SlotTable slots_;
  bool first_step_ = true;
  v1::KvEndpoint endpoint_;
  std::int64_t bytes_ = 0;
  std::atomic<int> num_done_{0};
  std::vector<std::unique_ptr<KvCache>> caches_;
  std::vector<std::unique_ptr<KvMover>> movers_;
};

// Bytes a second of one transfer of everything.
double Transfer(BenchGroup& from, BenchGroup& to, std::int64_t num_tokens, std::uint64_t id) {
  to.Step({{.kind = KvOp::Kind::kReceive, .transfer = id, .end_position = num_tokens}});
  const auto start = std::chrono::steady_clock::now();
  from.Step(
      {{.kind = KvOp::Kind::kSend, .transfer = id, .target = to.Target()},
       {.kind = KvOp::Kind::kSendRows, .last = true, .transfer = id, .end_position = num_tokens}});
  to.WaitUntilDone();
  const double took = Seconds(start);
  from.WaitUntilDone();
  from.Step({{.kind = KvOp::Kind::kClose, .transfer = id}});
  to.Step({{.kind = KvOp::Kind::kClose, .transfer = id}});
  return static_cast<double>(from.bytes()) / took;
}

double Memcpy(std::vector<std::byte>& to, const std::vector<std::byte>& from) {
  const auto start = std::chrono::steady_clock::now();
  std::memcpy(to.data(), from.data(), from.size());
  const double took = Seconds(start);
  CHECK(to[from.size() / 2] == from[from.size() / 2]);
  return static_cast<double>(from.size()) / took;
}

double Median(std::vector<double> values) {
  std::sort(values.begin(), values.end());
  return values[values.size() / 2];
}

// A way for KV to go, and what was measured of it.
struct Way {
  bool shared_memory;
  std::int32_t interleave;
  std::unique_ptr<BenchGroup> from, to;
  std::vector<double> rates;
};

std::vector<Way> MakeWays(std::int64_t num_tokens, int num_layers) {
  std::vector<Way> ways;
  for (const bool shared_memory : {true, false}) {
    for (const std::int32_t interleave : {kBlockSize / 2, 16, 1}) {
      const LayoutOptions from = {
          .tensor_parallel_size = 1, .block_size = kBlockSize, .interleave = 16};
      const LayoutOptions to = {.tensor_parallel_size = 2,
                                .decode_context_parallel_size = 2,
                                .block_size = kBlockSize,
                                .interleave = interleave};
      ways.push_back(
          {.shared_memory = shared_memory,
           .interleave = interleave,
           .from = std::make_unique<BenchGroup>(from, num_tokens, num_layers, shared_memory),
           .to = std::make_unique<BenchGroup>(to, num_tokens, num_layers, shared_memory),
           .rates = {}});
    }
  }
  return ways;
}

void Run(std::int64_t num_tokens, int num_layers, int num_rounds) {
  std::vector<Way> ways = MakeWays(num_tokens, num_layers);
  const auto size = static_cast<std::size_t>(ways[0].from->bytes());
  std::vector<std::byte> a(size, std::byte{1}), b(size, std::byte{2});
  std::vector<double> copies;
  std::uint64_t id = 0;
  for (int round = -1; round < num_rounds; ++round) {  // the first connects
    const double copy = Memcpy(b, a);
    if (round >= 0) copies.push_back(copy);
    for (Way& way : ways) {
      const double rate = Transfer(*way.from, *way.to, num_tokens, ++id);
      if (round >= 0) way.rates.push_back(rate);
    }
  }
  std::printf("%.1f MB of KV, f16, 1 rank -> 2 ranks; medians of %d interleaved rounds\n",
              static_cast<double>(size) / 1e6, num_rounds);
  std::printf("memcpy %.2f GB/s\n", Median(copies) / 1e9);
  for (const Way& way : ways) {
    const double rate = Median(way.rates);
    std::printf("%s, I = %-2d: %.2f GB/s, %.0f %% of the memcpy\n",
                way.shared_memory ? "read in memory" : "UCX over TCP  ", way.interleave, rate / 1e9,
                100 * rate / Median(copies));
  }
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) {
  std::int64_t num_tokens = 1024;
  int num_layers = 8, num_rounds = 5;
  CLI::App app("Speed of KV transfers on this host");
  app.add_option("--tokens", num_tokens, "Of the prompt")->check(CLI::Range(128, 1 << 20));
  app.add_option("--layers", num_layers, "Of the model")->check(CLI::Range(1, 100));
  app.add_option("--rounds", num_rounds, "Of each measurement")->check(CLI::Range(1, 1000));
  CLI11_PARSE(app, argc, argv);
  spdlog::set_level(spdlog::level::warn);
  weft::Run(num_tokens / weft::kBlockSize * weft::kBlockSize, num_layers, num_rounds);
}
