// Two engines and the network between them, by seed: requests are handed over, one way or both,
// while messages are late or lost, ranks fail, routers give up, clients leave. Every token has to be
// the right one, and in the end every block is back.
#include <cstdint>
#include <cstdlib>
#include <deque>
#include <map>
#include <memory>
#include <optional>
#include <random>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "tests/worker/engine/simulated_group.h"
#include "worker/engine/engine.h"

namespace weft {
namespace {

constexpr std::int32_t kVocab = 50;

// What the model says after `tokens`.
std::int32_t NextToken(std::uint64_t seed, const std::vector<std::int32_t>& tokens) {
  std::uint64_t hash = seed * 0x9e3779b97f4a7c15 + 1;
  for (const std::int32_t token : tokens) hash = (hash ^ token) * 0x100000001b3 + 77;
  return static_cast<std::int32_t>((hash >> 33) % kVocab);
}

struct Cell {
  std::uint64_t seed = 0;
  std::int64_t position = -1;
  std::int32_t token = 0;
};

struct Rows {  // a message
  std::uint64_t transfer;
  std::int64_t first;
  std::vector<Cell> cells;
};

// The ranks of a group, all at once, as the engine sees them.
class Ranks {
 public:
  Ranks(const EngineOptions& options)
      : options_(options),
        memory_(std::size_t{static_cast<std::uint32_t>(options.num_blocks)} * options.block_size),
        slots_(options.max_num_seqs),
        reports(options.num_ranks) {}

  // The sampled tokens.
  std::vector<std::int32_t> Execute(const StepPlan& launched) {
    std::vector<std::byte> message;
    EncodeStep(previous_, launched, message);
    StepPlan plan;
    std::vector<std::int32_t> previous;
    const absl::Status status = DecodeStep(message, LimitsOf(options_), previous, plan);
    EXPECT_TRUE(status.ok()) << status;
    std::size_t block = 0;
    for (const BlockTableDelta& delta : plan.table_deltas) {
      Slot& slot = slots_[delta.slot];
      slot.table.resize(delta.first_index);
      for (int i = 0; i < delta.num_blocks; ++i) slot.table.push_back(plan.delta_blocks[block++]);
    }
    for (const SamplingDelta& delta : plan.sampling_deltas) {
      slots_[delta.slot].seed = delta.params.seed;
    }
    for (const KvOp& op : plan.kv_ops) Begin(op);
    std::vector<std::int32_t> sampled;
    std::size_t row = 0;
    for (const PlanSequence& sequence : plan.sequences) {
      const Slot& slot = slots_[sequence.slot];
      for (int i = 0; i < sequence.num_rows; ++i, ++row) {
        const std::int32_t id = plan.token_ids[row];
        const std::int64_t position = sequence.first_position + i;
        At(slot.table, position) = {slot.seed, position, id >= 0 ? id : previous[~id]};
        if (i >= sequence.num_rows - sequence.num_sampled) {
          sampled.push_back(NextToken(slot.seed, Context(slot, position)));
        }
      }
    }
    for (const KvOp& op : plan.kv_ops) {
      if (op.kind != KvOp::Kind::kSendRows) continue;
      sends.at(op.transfer).ready = op.end_position;
      sends.at(op.transfer).last = op.last;
    }
    previous_ = sampled;
    return sampled;
  }

  struct Send {
    std::vector<std::int32_t> table;
    std::int64_t next = 0, ready = 0, untaken = 0;
    bool last = false, failed = false;
  };
  struct Receive {
    std::vector<std::int32_t> table;
    std::int64_t missing = 0;
  };

  Rows Take(std::uint64_t transfer, std::int64_t count) {
    Send& send = sends.at(transfer);
    Rows rows{transfer, send.next, {}};
    for (; count > 0 && send.next < send.ready; --count, ++send.next, ++send.untaken) {
      rows.cells.push_back(At(send.table, send.next));
    }
    return rows;
  }
  // False when the transfer is over.
  bool Store(const Rows& rows) {
    const auto receive = receives.find(rows.transfer);
    if (receive == receives.end()) return false;
    for (std::size_t i = 0; i < rows.cells.size(); ++i) {
      At(receive->second.table, rows.first + static_cast<std::int64_t>(i)) = rows.cells[i];
    }
    receive->second.missing -= static_cast<std::int64_t>(rows.cells.size());
    if (receive->second.missing == 0) ReportAll(rows.transfer, KvReport::Kind::kDone);
    return true;
  }
  void Taken(const Rows& rows) {
    const auto send = sends.find(rows.transfer);
    if (send == sends.end()) return;
    send->second.untaken -= static_cast<std::int64_t>(rows.cells.size());
    if (send->second.last && send->second.next == send->second.ready && send->second.untaken == 0) {
      ReportAll(rows.transfer, KvReport::Kind::kDone);
    }
  }
  void ReportAll(std::uint64_t transfer, KvReport::Kind kind) {
    for (auto& rank : reports) rank.push_back({.transfer = transfer, .kind = kind});
  }

 private:
  struct Slot {
    std::vector<std::int32_t> table;
    std::uint64_t seed = 0;
  };

  void Begin(const KvOp& op) {
    const std::vector<std::int32_t>& table = slots_[op.slot].table;
    switch (op.kind) {
      case KvOp::Kind::kReceive:
        EXPECT_GT(op.end_position, op.first_position);
        receives[op.transfer] = {table, op.end_position - op.first_position};
        ReportAll(op.transfer, KvReport::Kind::kOpened);
        break;
      case KvOp::Kind::kSend:
        sends[op.transfer] = {.table = table, .next = op.first_position};
        break;
      case KvOp::Kind::kSendRows:
        sends.at(op.transfer).table = table;
        break;
      case KvOp::Kind::kClose:
        EXPECT_EQ(sends.erase(op.transfer) + receives.erase(op.transfer), 1u);
        break;
    }
  }

  Cell& At(const std::vector<std::int32_t>& table, std::int64_t position) {
    return memory_[static_cast<std::size_t>(table.at(position / options_.block_size)) *
                       options_.block_size +
                   position % options_.block_size];
  }
  std::vector<std::int32_t> Context(const Slot& slot, std::int64_t position) {
    std::vector<std::int32_t> context;
    for (std::int64_t p = 0; p <= position; ++p) {
      const Cell& cell = At(slot.table, p);
      if (cell.seed != slot.seed || cell.position != p) {
        ADD_FAILURE() << "position " << p << " of sequence " << slot.seed << " holds position "
                      << cell.position << " of " << cell.seed;
        break;
      }
      context.push_back(cell.token);
    }
    return context;
  }

  const EngineOptions options_;
  std::vector<Cell> memory_;
  std::vector<Slot> slots_;
  std::vector<std::int32_t> previous_;

 public:
  std::map<std::uint64_t, Send> sends;
  std::map<std::uint64_t, Receive> receives;
  std::vector<std::deque<KvReport>> reports;  // of each rank, on their way
};

struct Group {
  explicit Group(const EngineOptions& options) : ranks(options) {
    auto made = Engine::Create(options);
    EXPECT_TRUE(made.ok()) << made.status();
    engine = *std::move(made);
  }
  void Plan(absl::Time now) {
    if (const StepPlan* plan = engine->Step(now, std::nullopt)) queue.push_back(*plan);
  }
  void Execute(absl::Time now) {
    if (queue.empty()) return;
    const std::uint64_t step = queue.front().step;
    const std::vector<std::int32_t> tokens = ranks.Execute(queue.front());
    queue.pop_front();
    const StepPlan* plan = engine->Step(now, StepResult{.step = step, .token_ids = tokens});
    if (plan != nullptr) queue.push_back(*plan);
  }

  std::unique_ptr<Engine> engine;
  Ranks ranks;
  std::deque<StepPlan> queue;
};

// A request as its client and router see it.
struct Client {
  std::vector<std::int32_t> prompt;
  std::int32_t max_tokens = 0;
  std::vector<std::int32_t> tokens;
  std::optional<std::int32_t> first_token;
  int decodes = 1;  // the group; the other one computes its prompt
  bool prefill_runs = false, prefill_failed = false, told = false;
  bool ended = false, cancelled = false;
  FinishReason finish = FinishReason::kNone;
};

class Simulation {
 public:
  explicit Simulation(std::uint64_t seed) : random_(seed) {
    faults_ = Draw(0, 2) > 0;
    for (auto& group : groups_) group = std::make_unique<Group>(DrawOptions());
    const bool both_ways = Draw(0, 1) == 1;
    const int num_clients = Draw(1, 8);
    for (int i = 0; i < num_clients; ++i) {
      Client client;
      client.max_tokens = Draw(1, 12);
      if (both_ways) client.decodes = Draw(0, 1);
      for (int n = Draw(1, 40); n > 0; --n) client.prompt.push_back(Draw(0, kVocab - 1));
      clients_.push_back(client);
    }
  }

  void Run() {
    for (int i = 0; i < 100000 && !Over(); ++i) {
      now_ += absl::Milliseconds(Draw(0, 4) == 0 ? Draw(0, 40) : 0);
      Act();
      for (const auto& group : groups_) HandleEvents(*group);
      if (::testing::Test::HasFailure()) return;
    }
    EXPECT_TRUE(Over()) << "hangs";
    for (std::size_t i = 0; i < clients_.size(); ++i) Check(i);
    for (const auto& group : groups_) {
      const EngineStats stats = group->engine->Stats();
      EXPECT_EQ(stats.num_free_blocks, stats.num_blocks);
      EXPECT_EQ(stats.num_running + stats.num_waiting, 0);
      EXPECT_TRUE(group->ranks.sends.empty() && group->ranks.receives.empty());
    }
  }
  int num_handed() const { return num_handed_; }
  int num_dropped() const { return num_dropped_; }
  int num_recomputed() const { return num_recomputed_; }

 private:
  int Draw(int from, int to) { return std::uniform_int_distribution<int>(from, to)(random_); }

  EngineOptions DrawOptions() {
    EngineOptions options;
    options.block_size = Draw(1, 4) * 4;
    options.max_model_len = 64;
    options.num_blocks = (64 + options.block_size - 1) / options.block_size * Draw(1, 3) + 1;
    options.max_num_seqs = Draw(1, 4);
    options.max_num_batched_tokens = Draw(1, 30);
    options.vocab_size = kVocab;
    options.async_scheduling = Draw(0, 1) == 1;
    options.num_ranks = Draw(1, 3);
    // Without faults nobody waits for a lease to end.
    options.kv_lease = faults_ ? absl::Seconds(2) : absl::InfiniteDuration();
    options.force_preemption_every = Draw(0, 3) == 0 ? Draw(2, 9) : 0;
    return options;
  }
  Group& DecodeOf(std::size_t client) { return *groups_[clients_[client].decodes]; }
  Group& PrefillOf(std::size_t client) { return *groups_[1 - clients_[client].decodes]; }
  static std::uint64_t TransferOf(std::size_t client) { return client + 1000; }
  EngineRequest RequestOf(std::size_t client) const {
    EngineRequest request;
    request.id = RequestId{client};
    request.prompt_token_ids = clients_[client].prompt;
    request.max_tokens = clients_[client].max_tokens;
    request.sampling.seed = client + 1;
    request.kv_transfer = TransferOf(client);
    return request;
  }

  bool Over() const {
    if (next_client_ < clients_.size()) return false;
    for (const auto& group : groups_) {
      if (!group->queue.empty() || group->engine->HasWork()) return false;
    }
    for (const Client& client : clients_) {
      if (!client.ended || client.prefill_runs) return false;
    }
    return true;
  }

  void Act() {
    Group& group = *groups_[Draw(0, 1)];
    switch (Draw(0, 6)) {
      case 0:
        return group.Plan(now_);
      case 1:
        return group.Execute(now_);
      case 2:
        return Report(group);
      case 3:
        return SendSome(group);
      case 4:
        return DeliverSome();
      case 5:
        if (next_client_ < clients_.size() && Draw(0, 3) == 0) Arrive();
        return;
      default:
        if (faults_ && Draw(0, 60) == 0) Strike();
    }
  }
  void Arrive() {
    EXPECT_TRUE(DecodeOf(next_client_).engine->Add(RequestOf(next_client_), now_).ok());
    ++next_client_;
  }
  void Report(Group& group) {
    auto& rank = group.ranks.reports[Draw(0, static_cast<int>(group.ranks.reports.size()) - 1)];
    if (rank.empty()) return;
    group.engine->OnKvReport(rank.front());
    rank.pop_front();
  }
  void SendSome(Group& group) {
    auto& sends = group.ranks.sends;
    if (sends.empty()) return;
    const auto it = std::next(sends.begin(), Draw(0, static_cast<int>(sends.size()) - 1));
    if (it->second.failed || it->second.next == it->second.ready) return;
    network_.push_back(group.ranks.Take(it->first, Draw(1, 9)));
  }
  void DeliverSome() {
    if (network_.empty()) return;
    const int at = Draw(0, static_cast<int>(network_.size()) - 1);
    const Rows rows = std::move(network_[at]);
    network_.erase(network_.begin() + at);
    if (faults_ && Draw(0, 50) == 0) return;  // lost, and nobody hears of it
    const std::size_t client = rows.transfer - TransferOf(0);
    Ranks& sender = PrefillOf(client).ranks;
    if (DecodeOf(client).ranks.Store(rows)) return sender.Taken(rows);
    ++num_dropped_;
    const auto send = sender.sends.find(rows.transfer);
    if (send == sender.sends.end() || send->second.failed) return;
    send->second.failed = true;
    sender.reports[0].push_back(
        {.transfer = rows.transfer, .kind = KvReport::Kind::kFailed, .error = "given up"});
  }
  // Something goes wrong with a request.
  void Strike() {
    if (next_client_ == 0) return;
    const std::size_t i = Draw(0, static_cast<int>(next_client_) - 1);
    Client& client = clients_[i];
    switch (Draw(0, 3)) {
      case 0:  // its client leaves
        client.cancelled = true;
        DecodeOf(i).engine->Cancel(RequestId{i});
        PrefillOf(i).engine->Cancel(RequestId{i});
        return;
      case 1:  // the prefill leg is lost: the router hears of it by its end
        if (client.prefill_runs) PrefillOf(i).engine->Cancel(RequestId{i});
        return;
      case 2:
        DecodeOf(i).engine->OnKvReport(
            {.transfer = TransferOf(i), .kind = KvReport::Kind::kFailed, .error = "a rank fails"});
        return;
      default:
        PrefillOf(i).engine->OnKvReport(
            {.transfer = TransferOf(i), .kind = KvReport::Kind::kFailed, .error = "a rank fails"});
    }
  }

  void HandleEvents(Group& group) {
    for (const TokenEvent& event : group.engine->TakeEvents()) {
      const auto i = static_cast<std::size_t>(event.id);
      &group == &PrefillOf(i) ? OnPrefillEvent(i, event) : OnDecodeEvent(i, event);
    }
  }
  void OnPrefillEvent(std::size_t i, const TokenEvent& event) {
    Client& client = clients_[i];
    if (event.token_id.has_value()) {
      client.first_token = event.token_id;
      Append(client, event);
      if (event.finish != FinishReason::kNone) {
        client.finish = event.finish;
        DecodeOf(i).engine->Cancel(event.id);
      } else {
        DecodeOf(i).engine->ContinueKv(event.id, event.token_id, "");
      }
    }
    if (event.finish == FinishReason::kNone) return;
    client.prefill_runs = false;
    num_handed_ += event.finish == FinishReason::kHandedOff;
    if (event.finish == FinishReason::kHandedOff || client.finish != FinishReason::kNone) return;
    DecodeOf(i).engine->ContinueKv(event.id, client.first_token, "the prefill group failed");
  }
  void OnDecodeEvent(std::size_t i, const TokenEvent& event) {
    Client& client = clients_[i];
    if (event.kv_reserved.has_value()) {
      EngineRequest request = RequestOf(i);
      request.kv_target = std::make_shared<const std::string>("there");
      request.kv_first_position = event.kv_reserved->first_position;
      EXPECT_TRUE(PrefillOf(i).engine->Add(std::move(request), now_).ok());
      client.prefill_runs = true;
    }
    if (!event.kv_failure.empty()) {
      ++num_recomputed_;
      if (client.prefill_runs) PrefillOf(i).engine->Cancel(event.id);
    }
    if (event.token_id.has_value()) Append(client, event);
    if (event.finish == FinishReason::kNone) return;
    client.ended = true;
    if (client.finish == FinishReason::kNone) client.finish = event.finish;
    if (client.prefill_runs) PrefillOf(i).engine->Cancel(event.id);
  }
  void Append(Client& client, const TokenEvent& event) {
    const auto known = static_cast<std::int32_t>(client.tokens.size());
    EXPECT_LE(event.output_index, known) << "a token is left out";
    if (event.output_index == known) client.tokens.push_back(*event.token_id);
  }

  void Check(std::size_t i) {
    const Client& client = clients_[i];
    std::vector<std::int32_t> all = client.prompt;
    for (const std::int32_t token : client.tokens) {
      EXPECT_EQ(token, NextToken(i + 1, all)) << "request " << i;
      all.push_back(token);
    }
    if (client.cancelled) return;
    EXPECT_EQ(client.finish, FinishReason::kLength) << "request " << i;
    EXPECT_EQ(static_cast<std::int32_t>(client.tokens.size()), client.max_tokens);
  }

  std::mt19937_64 random_;
  absl::Time now_ = absl::UnixEpoch();
  std::unique_ptr<Group> groups_[2];
  bool faults_ = false;
  std::vector<Client> clients_;
  std::size_t next_client_ = 0;
  std::vector<Rows> network_;
  int num_handed_ = 0, num_dropped_ = 0, num_recomputed_ = 0;
};

TEST(KvSimulationTest, EveryTokenIsRightAndEveryBlockComesBack) {
  const char* one = std::getenv("WEFT_SEED");
  const std::uint64_t first = one == nullptr ? 0 : std::strtoull(one, nullptr, 10);
  int handed = 0, dropped = 0, recomputed = 0;
  for (std::uint64_t seed = first; seed < first + (one == nullptr ? 1000 : 1); ++seed) {
    SCOPED_TRACE(fmt::format("WEFT_SEED={}", seed));
    Simulation simulation(seed);
    simulation.Run();
    if (HasFailure()) return;
    handed += simulation.num_handed();
    dropped += simulation.num_dropped();
    recomputed += simulation.num_recomputed();
  }
  if (one != nullptr) return;
  EXPECT_GT(handed, 1000);
  EXPECT_GT(dropped, 100);
  EXPECT_GT(recomputed, 100);
  std::printf("%d handed over, %d recomputed, %d late messages\n", handed, recomputed, dropped);
}

}  // namespace
}  // namespace weft
