// Sessions whose prompts grow turn by turn, over one engine for 100,000 steps: what a request finds
// in the prefix cache is what is there of it, and what its rows read is its own prefix.

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <set>

#include "gtest/gtest.h"
#include "tests/worker/engine/block_index.h"
#include "tests/worker/engine/simulated_group.h"
#include "worker/engine/engine.h"

namespace weft {
namespace {

using Random = std::mt19937_64;
using Tokens = std::vector<std::int32_t>;

std::int64_t Draw(Random& random, std::int64_t min, std::int64_t max) {
  return std::uniform_int_distribution<std::int64_t>(min, max)(random);
}

constexpr std::uint64_t kSeeds[] = {1, 2, 3, 4};
constexpr std::int64_t kSteps = 100'000;
constexpr std::int64_t kSessions = 12;
const char* const kSalts[] = {"", "one tenant", "another"};

// A run whose every choice follows from its seed.
class LongRun {
 public:
  explicit LongRun(std::uint64_t seed)
      : random_(seed), options_(DrawOptions()), oracle_(model_), group_(options_, model_, oracle_) {
    engine_ = *Engine::Create(options_);
    for (Tokens& prefix : prefixes_) prefix = DrawTokens(Draw(random_, 0, 20));
    sessions_.resize(kSessions);
  }

  void Run() {
    while (group_steps_ < kSteps) {
      for (Session& session : sessions_) MaybeAct(session);
      StepOnce();
      if (testing::Test::HasFailure()) return;
    }
    Drain();
    const EngineStats stats = engine_->Stats();
    EXPECT_EQ(stats.num_free_blocks, stats.num_blocks);
    EXPECT_GT(stats.prefix_cache_hits, stats.prefix_cache_queries / 20);
    EXPECT_LT(stats.prefix_cache_hits, stats.prefix_cache_queries);
    EXPECT_GT(stats.prefix_cache_evictions, 1000u);
    EXPECT_GT(stats.num_preemptions, 30u);
    EXPECT_GT(group_.num_rewrites(), 10);
    EXPECT_GT(num_admissions_, 3000);
  }

 private:
  struct Session {
    const char* salt = "";
    Tokens tokens;  // of all turns; of the prompt and what came since, while a request runs
    std::uint64_t request = 0;  // that runs
    bool scored = false;
    bool seen = false;  // in a plan
  };

  EngineOptions DrawOptions() {
    const auto block_size = static_cast<std::int32_t>(Draw(random_, 1, 6));
    const std::int32_t blocks_of_one = (64 + block_size - 1) / block_size;
    return {.block_size = block_size,
            .num_blocks = static_cast<std::int32_t>(blocks_of_one * Draw(random_, 2, 4)),
            .max_model_len = 64,
            .max_num_seqs = static_cast<std::int32_t>(Draw(random_, 2, 8)),
            .max_num_batched_tokens = static_cast<std::int32_t>(Draw(random_, 6, 40)),
            .vocab_size = model_.vocab_size,
            .async_scheduling = Draw(random_, 0, 1) == 1,
            .block_hash_key = "a model",
            .force_preemption_every = static_cast<std::int32_t>(Draw(random_, 0, 1) * 31)};
  }

  Tokens DrawTokens(std::int64_t count) {
    Tokens tokens(count);
    for (auto& token : tokens) token = static_cast<std::int32_t>(Draw(random_, 0, 3));
    return tokens;
  }

  void MaybeAct(Session& session) {
    if (session.request == 0) {
      if (Draw(random_, 0, 19) == 0) StartTurn(session);
    } else if (Draw(random_, 0, 999) == 0) {
      engine_->Cancel(RequestId{session.request});
    }
  }

  void StartTurn(Session& session) {
    const std::int64_t more = Draw(random_, 1, 8);
    if (static_cast<std::int64_t>(session.tokens.size()) + more >= options_.max_model_len ||
        Draw(random_, 0, 9) == 0) {
      session.salt = kSalts[Draw(random_, 0, 2)];
      session.tokens = prefixes_[Draw(random_, 0, 3)];
    }
    const Tokens tail = DrawTokens(more);
    session.tokens.insert(session.tokens.end(), tail.begin(), tail.end());
    session.request = next_request_++;
    session.scored = Draw(random_, 0, 9) == 0;
    session.seen = false;

    EngineRequest request;
    request.id = RequestId{session.request};
    request.prompt_token_ids = session.tokens;
    request.max_tokens = static_cast<std::int32_t>(Draw(random_, 1, 12));
    request.sampling.seed = session.request;
    request.cache_salt = session.salt;
    request.priority = static_cast<std::int32_t>(Draw(random_, 0, 1));
    if (session.scored) {
      LogitsParams params;
      params.prompt_logprobs = 0;
      request.logits = std::make_shared<const LogitsParams>(params);
    }
    oracle_.Add(request);
    ASSERT_TRUE(engine_->Add(std::move(request), absl::UnixEpoch()).ok());
  }

  void StepOnce() {
    std::optional<StepResult> result;
    if (group_.num_in_flight() > 0 && Draw(random_, 0, 2) > 0) {
      result = group_.Execute();
      ++group_steps_;
    }
    const StepPlan* plan = engine_->Step(absl::UnixEpoch(), result);
    for (const TokenEvent& event : engine_->TakeEvents()) Take(event);
    std::set<BlockHash> fresh;
    const absl::Span<const BlockChange> changes = engine_->TakeBlockChanges();
    for (const BlockChange& change : changes) {
      if (!change.removed) fresh.insert(change.hash);
    }
    index_.Apply(changes);
    ASSERT_EQ(engine_->Stats().num_cached_blocks, index_.size());
    if (plan == nullptr) return;
    CheckHits(*plan, fresh);
    group_.Launch(*plan);
  }

  Session* SessionOf(std::uint64_t request) {
    const auto at = std::find_if(sessions_.begin(), sessions_.end(),
                                 [request](const Session& s) { return s.request == request; });
    return at == sessions_.end() ? nullptr : &*at;
  }

  void Take(const TokenEvent& event) {
    Session* session = SessionOf(static_cast<std::uint64_t>(event.id));
    ASSERT_NE(session, nullptr);
    if (event.token_id.has_value()) session->tokens.push_back(*event.token_id);
    const absl::Span<const std::int32_t> truth =
        oracle_.Tokens(session->request, session->tokens.size());
    EXPECT_TRUE(std::equal(truth.begin(), truth.end(), session->tokens.begin()));
    if (event.finish != FinishReason::kNone) session->request = 0;
  }

  // A sequence that takes over a slot starts behind the blocks of its that are in the index.
  void CheckHits(const StepPlan& plan, const std::set<BlockHash>& fresh) {
    std::map<std::int32_t, std::uint64_t> owners;
    for (const SamplingDelta& delta : plan.sampling_deltas) owners[delta.slot] = delta.params.seed;
    for (const PlanSequence& sequence : plan.sequences) {
      if (!owners.contains(sequence.slot)) continue;
      Session* session = SessionOf(owners.at(sequence.slot));
      ASSERT_NE(session, nullptr);
      ++num_admissions_;
      std::vector<BlockHash> chain = StartHashChain(options_.block_hash_key, session->salt);
      ExtendHashChain(session->tokens, options_.block_size, chain);
      const std::int64_t num_hits = sequence.first_position / options_.block_size;
      ASSERT_LT(num_hits, static_cast<std::int64_t>(chain.size()));
      for (std::int64_t i = 0; i < num_hits; ++i) ASSERT_TRUE(index_.Contains(chain[1 + i]));
      if (session->scored) {
        EXPECT_TRUE(num_hits == 0 || session->seen) << "a prompt that is to be scored was skipped";
      } else if (num_hits <
                 (static_cast<std::int64_t>(session->tokens.size()) - 1) / options_.block_size) {
        const BlockHash& next = chain[1 + num_hits];
        EXPECT_TRUE(!index_.Contains(next) || fresh.contains(next)) << "was there, but not found";
      }
      session->seen = true;
    }
  }

  void Drain() {
    const auto running = [](const Session& session) { return session.request != 0; };
    for (int i = 0; i < 100'000; ++i) {
      if (group_.num_in_flight() == 0 && std::none_of(sessions_.begin(), sessions_.end(), running))
        return;
      StepOnce();
    }
    ADD_FAILURE() << "no end in sight";
  }

  Random random_;
  const SimulatedModel model_{.vocab_size = 4};
  const EngineOptions options_;
  Oracle oracle_;
  SimulatedGroup group_;
  std::unique_ptr<Engine> engine_;
  BlockIndex index_;
  Tokens prefixes_[4];
  std::vector<Session> sessions_;
  std::uint64_t next_request_ = 1;
  std::int64_t group_steps_ = 0;
  std::int64_t num_admissions_ = 0;
};

TEST(PrefixCacheTraceTest, RequestsFindTheirOwnPrefixAndNothingElse) {
  const char* text = std::getenv("WEFT_SEED");
  std::vector<std::uint64_t> seeds(std::begin(kSeeds), std::end(kSeeds));
  if (text != nullptr) seeds = {std::strtoull(text, nullptr, 10)};
  for (const std::uint64_t seed : seeds) {
    SCOPED_TRACE(testing::Message() << "WEFT_SEED=" << seed);
    LongRun(seed).Run();
    if (HasFailure()) return;
  }
}

}  // namespace
}  // namespace weft
