// Random traces by seed: whatever arrives, leaves, is preempted or rerun, every request gets the
// tokens of the plain sequential computation, and nothing leaks or hangs.

#include <algorithm>
#include <cstdlib>
#include <map>
#include <random>
#include <string>

#include "gtest/gtest.h"
#include "tests/worker/engine/block_index.h"
#include "tests/worker/engine/simulated_group.h"
#include "worker/engine/engine.h"

namespace weft {
namespace {

using Random = std::mt19937_64;

std::int64_t Draw(Random& random, std::int64_t min, std::int64_t max) {
  return std::uniform_int_distribution<std::int64_t>(min, max)(random);
}

std::vector<std::int32_t> DrawTokens(Random& random, std::int64_t count, std::int32_t vocab_size) {
  std::vector<std::int32_t> tokens(count);
  for (auto& token : tokens) token = Draw(random, 0, vocab_size - 1);
  return tokens;
}

absl::Time At(std::int64_t tick) { return absl::UnixEpoch() + absl::Seconds(tick); }

struct TracedRequest {
  EngineRequest request;
  std::int64_t arrival_tick = 0;
  std::int64_t cancel_tick = -1;

  // What it gives if nobody ends it early.
  std::vector<std::int32_t> expected_tokens;
  FinishReason expected_finish = FinishReason::kNone;

  bool added = false;
  bool cancelled = false;
  std::vector<std::int32_t> tokens;
  std::size_t num_prompt_logprobs = 0;
  FinishReason finish = FinishReason::kNone;
};

struct Trace {
  EngineOptions options;
  SimulatedModel model;
  std::vector<TracedRequest> requests;
};

// What all traces together have seen; guards against a test that tests nothing.
struct Coverage {
  std::map<FinishReason, int> finishes;
  std::int64_t prompt_logprobs = 0;
  int no_token_left = 0;
  std::uint64_t preemptions = 0;
  std::int64_t references = 0;
  std::uint64_t steps = 0;
  std::uint64_t cache_hits = 0;
  std::uint64_t evictions = 0;
  std::int64_t rewrites = 0;
};

EngineOptions DrawOptions(Random& random) {
  EngineOptions options;
  options.block_size = Draw(random, 1, 8);
  options.max_model_len = Draw(random, 2, 48);
  const std::int64_t least = (options.max_model_len + options.block_size - 1) / options.block_size;
  options.num_blocks =
      least + (Draw(random, 0, 2) == 0 ? Draw(random, 0, 100) : Draw(random, 0, 6));
  options.max_num_seqs = Draw(random, 1, 8);
  options.max_num_batched_tokens =
      Draw(random, 0, 2) == 0 ? Draw(random, 1, 64) : Draw(random, 1, 8);
  options.vocab_size = Draw(random, 2, 60);
  options.async_scheduling = Draw(random, 0, 1) == 1;
  options.force_preemption_every = std::max<std::int64_t>(0, Draw(random, -3, 5));
  options.enable_prefix_caching = Draw(random, 0, 3) > 0;
  return options;
}

std::shared_ptr<const LogitsParams> DrawLogits(Random& random, const EngineRequest& request) {
  LogitsParams params;
  if (Draw(random, 0, 1) == 0) {
    params.min_tokens = Draw(random, 0, std::min(request.max_tokens, 6));
    params.ending_tokens = request.eos_token_ids;
    params.ending_tokens.insert(params.ending_tokens.end(), request.stop_token_ids.begin(),
                                request.stop_token_ids.end());
  }
  if (Draw(random, 0, 1) == 0) params.logprobs = Draw(random, 0, 2);
  if (Draw(random, 0, 1) == 0) params.prompt_logprobs = Draw(random, 0, 2);
  if (params.IsNeutral()) params.presence_penalty = 1;
  return std::make_shared<const LogitsParams>(std::move(params));
}

// Often begins as an earlier request with its output, or as a part of it.
std::vector<std::int32_t> DrawPrompt(Random& random, const std::vector<TracedRequest>& earlier,
                                     const EngineOptions& options) {
  const std::int64_t length = Draw(random, 1, options.max_model_len - 1);
  std::vector<std::int32_t> prompt;
  if (!earlier.empty() && Draw(random, 0, 2) > 0) {
    const TracedRequest& other = earlier[Draw(random, 0, earlier.size() - 1)];
    prompt = other.request.prompt_token_ids;
    prompt.insert(prompt.end(), other.expected_tokens.begin(), other.expected_tokens.end());
    prompt.resize(std::min<std::int64_t>(Draw(random, 0, prompt.size()), length));
  }
  const auto tail = DrawTokens(random, length - prompt.size(), options.vocab_size);
  prompt.insert(prompt.end(), tail.begin(), tail.end());
  return prompt;
}

TracedRequest DrawRequest(Random& random, const std::vector<TracedRequest>& earlier,
                          const EngineOptions& options) {
  TracedRequest traced;
  EngineRequest& request = traced.request;
  const std::uint64_t id = earlier.size() + 1;
  request.id = RequestId{id};
  request.prompt_token_ids = DrawPrompt(random, earlier, options);
  if (Draw(random, 0, 3) == 0) request.cache_salt = "salt";
  if (Draw(random, 0, 3) == 0) {
    request.resume_token_ids = DrawTokens(random, Draw(random, 1, 6), options.vocab_size);
  }
  request.max_tokens = Draw(random, 0, 4) == 0 ? 1'000'000'000 : Draw(random, 1, 20);
  if (Draw(random, 0, 1) == 0) {
    request.stop_token_ids = DrawTokens(random, Draw(random, 1, 3), options.vocab_size);
  }
  request.eos_token_ids = DrawTokens(random, Draw(random, 0, 2), options.vocab_size);
  request.ignore_eos = Draw(random, 0, 2) == 0;
  request.sampling.seed = id;
  request.priority = Draw(random, -1, 1);
  if (Draw(random, 0, 1) == 0) request.logits = DrawLogits(random, request);
  traced.arrival_tick = Draw(random, 0, 60);
  if (Draw(random, 0, 5) == 0) traced.cancel_tick = traced.arrival_tick + Draw(random, 0, 40);
  if (Draw(random, 0, 5) == 0) {
    request.deadline = At(traced.arrival_tick + Draw(random, 0, 40));
  }
  return traced;
}

// Fills in what the request gives if nobody ends it early.
void Expect(const Trace& trace, TracedRequest& traced) {
  const EngineRequest& request = traced.request;
  const auto contains = [](const std::vector<std::int32_t>& ids, std::int32_t id) {
    return std::find(ids.begin(), ids.end(), id) != ids.end();
  };
  std::vector<std::int32_t> tokens = request.prompt_token_ids;
  const auto num_prompt_tokens = static_cast<std::int32_t>(tokens.size());
  const std::int32_t min_tokens = request.logits == nullptr ? 0 : request.logits->min_tokens;
  if (request.logits != nullptr && request.logits->prompt_logprobs.has_value() &&
      request.resume_token_ids.empty()) {
    for (std::size_t i = 1; i < tokens.size(); ++i) {
      if (trace.model.NextToken(request.sampling.seed, absl::MakeConstSpan(tokens).first(i)) ==
          -1) {
        traced.expected_finish = FinishReason::kError;
        return;
      }
    }
  }
  for (std::int64_t i = 0;; ++i) {
    const bool resumed = i < static_cast<std::int64_t>(request.resume_token_ids.size());
    const std::int32_t token = resumed
                                   ? request.resume_token_ids[i]
                                   : trace.model.Sample(request.sampling.seed, tokens,
                                                        num_prompt_tokens, request.logits.get());
    if (token < 0) {
      traced.expected_finish = FinishReason::kError;
      return;
    }
    tokens.push_back(token);
    if (!resumed) traced.expected_tokens.push_back(token);
    const bool may_end = i >= min_tokens;
    if (may_end && !request.ignore_eos && contains(request.eos_token_ids, token)) {
      traced.expected_finish = FinishReason::kEos;
    } else if (may_end && contains(request.stop_token_ids, token)) {
      traced.expected_finish = FinishReason::kStopToken;
    } else if (i + 1 >= request.max_tokens ||
               static_cast<std::int64_t>(tokens.size()) >= trace.options.max_model_len) {
      traced.expected_finish = FinishReason::kLength;
    }
    if (traced.expected_finish != FinishReason::kNone) return;
  }
}

Trace DrawTrace(std::uint64_t seed) {
  Random random(seed);
  Trace trace;
  trace.options = DrawOptions(random);
  trace.model.vocab_size = trace.options.vocab_size;
  if (Draw(random, 0, 2) == 0) trace.model.nan_one_in = Draw(random, 20, 200);
  const std::int64_t num_requests = Draw(random, 1, 14);
  for (std::int64_t i = 0; i < num_requests; ++i) {
    trace.requests.push_back(DrawRequest(random, trace.requests, trace.options));
    Expect(trace, trace.requests.back());
  }
  return trace;
}

class TraceRunner {
 public:
  TraceRunner(Trace trace, std::uint64_t seed)
      : trace_(std::move(trace)),
        oracle_(trace_.model),
        group_(trace_.options, trace_.model, oracle_),
        random_(~seed) {}

  void Run(Coverage& coverage);

 private:
  void AddAndCancel();
  void StepOnce();
  void TakeEvents();
  void CheckLogprobs(TracedRequest& traced, const TokenEvent& event);
  void CheckFinished(const TracedRequest& traced);
  std::int64_t MaxSteps() const;
  TracedRequest& Find(RequestId id) {
    return trace_.requests.at(static_cast<std::uint64_t>(id) - 1);
  }

  Trace trace_;
  Oracle oracle_;
  SimulatedGroup group_;
  Random random_;
  std::unique_ptr<Engine> engine_;
  BlockIndex index_;
  std::int64_t tick_ = 0;
  std::size_t num_done_ = 0;
  std::uint64_t num_tokens_ = 0;
  int no_token_left_ = 0;
  bool stalled_ = false;  // there was work, and the last Step() planned none
};

// A bound on the steps of a trace in which every step makes progress: every token of every request
// may cost a whole recomputation, each of them with one row a step in the worst case.
std::int64_t TraceRunner::MaxSteps() const {
  std::int64_t steps = 200;
  for (const TracedRequest& traced : trace_.requests) {
    const std::int64_t tokens = traced.expected_tokens.size() + 2;
    const auto length = static_cast<std::int64_t>(traced.request.prompt_token_ids.size() +
                                                  traced.request.resume_token_ids.size()) +
                        tokens;
    steps += tokens * (length + 4);
  }
  return steps;
}

void TraceRunner::Run(Coverage& coverage) {
  absl::StatusOr<std::unique_ptr<Engine>> engine = Engine::Create(trace_.options);
  ASSERT_TRUE(engine.ok()) << engine.status();
  engine_ = *std::move(engine);
  // Ticks in which nothing is delivered cost no step: hence the factor.
  for (; num_done_ < trace_.requests.size() || group_.num_in_flight() > 0; ++tick_) {
    ASSERT_LT(tick_, 8 * MaxSteps()) << "no end in sight";
    AddAndCancel();
    StepOnce();
    TakeEvents();
    index_.Apply(engine_->TakeBlockChanges());
    ASSERT_EQ(engine_->Stats().num_cached_blocks, index_.size());
    if (testing::Test::HasFailure()) return;
  }
  EXPECT_EQ(engine_->Step(At(tick_), std::nullopt), nullptr);
  EXPECT_TRUE(engine_->TakeEvents().empty());
  EXPECT_FALSE(engine_->HasWork());
  EXPECT_EQ(engine_->NextDeadline(), absl::InfiniteFuture());
  const EngineStats stats = engine_->Stats();
  EXPECT_EQ(stats.num_free_blocks, trace_.options.num_blocks);
  EXPECT_EQ(stats.num_running, 0);
  EXPECT_EQ(stats.num_waiting, 0);
  EXPECT_EQ(stats.kv_tokens, 0);
  EXPECT_EQ(stats.generation_tokens, num_tokens_);
  EXPECT_LE(static_cast<std::int64_t>(stats.steps), MaxSteps());
  coverage.preemptions += stats.num_preemptions;
  coverage.references += group_.num_references();
  coverage.steps += stats.steps;
  coverage.cache_hits += stats.prefix_cache_hits;
  coverage.evictions += stats.prefix_cache_evictions;
  coverage.rewrites += group_.num_rewrites();
  coverage.no_token_left += no_token_left_;
  for (const TracedRequest& traced : trace_.requests) {
    ++coverage.finishes[traced.finish];
    coverage.prompt_logprobs += static_cast<std::int64_t>(traced.num_prompt_logprobs);
  }
}

void TraceRunner::AddAndCancel() {
  for (TracedRequest& traced : trace_.requests) {
    const EngineRequest& request = traced.request;
    if (!traced.added && traced.arrival_tick <= tick_) {
      oracle_.Add(request);
      absl::Status status = CheckRequest(request, engine_->options());
      ASSERT_TRUE(status.ok()) << status;
      status = engine_->Add(request, At(tick_));
      ASSERT_TRUE(status.ok()) << status;
      traced.added = true;
    }
    if (traced.cancel_tick == tick_) {
      engine_->Cancel(request.id);
      traced.cancelled = true;
    }
  }
}

void TraceRunner::StepOnce() {
  const bool idle = group_.num_in_flight() == 0;
  const bool has_work = engine_->HasWork();
  EXPECT_TRUE(idle || !has_work);
  std::optional<StepResult> result;
  if (!idle && Draw(random_, 0, 1) == 0) result = group_.Execute();
  const StepPlan* plan = engine_->Step(At(tick_), result);
  if (plan != nullptr) {
    group_.Launch(*plan);
    EXPECT_LE(group_.num_in_flight(), trace_.options.async_scheduling ? 2 : 1);
  }
  stalled_ = idle && has_work && plan == nullptr;
}

void TraceRunner::TakeEvents() {
  const absl::Span<const TokenEvent> events = engine_->TakeEvents();
  EXPECT_FALSE(stalled_ && events.empty()) << "requests, nothing in flight, and nothing planned";
  for (const TokenEvent& event : events) {
    TracedRequest& traced = Find(event.id);
    ASSERT_EQ(traced.finish, FinishReason::kNone) << "news after the end";
    CheckLogprobs(traced, event);
    if (event.token_id.has_value()) {
      traced.tokens.push_back(*event.token_id);
      ++num_tokens_;
    }
    if (event.error.code() == absl::StatusCode::kInvalidArgument) {
      ++no_token_left_;
    } else {
      EXPECT_EQ(event.error.code(), event.finish == FinishReason::kError
                                        ? absl::StatusCode::kInternal
                                        : absl::StatusCode::kOk);
    }
    traced.finish = event.finish;
    if (event.finish == FinishReason::kNone) continue;
    ++num_done_;
    CheckFinished(traced);
  }
}

// Scores are positions. Those of the prompt come once each, in order, before the first token.
void TraceRunner::CheckLogprobs(TracedRequest& traced, const TokenEvent& event) {
  const EngineRequest& request = traced.request;
  const auto& prompt = request.prompt_token_ids;
  const LogitsParams none;
  const LogitsParams& asked = request.logits == nullptr ? none : *request.logits;
  for (const PositionLogprobs& position : event.prompt_logprobs) {
    ASSERT_TRUE(asked.prompt_logprobs.has_value() && traced.tokens.empty());
    EXPECT_EQ(position.token.logprob, static_cast<float>(traced.num_prompt_logprobs));
    ASSERT_LT(++traced.num_prompt_logprobs, prompt.size());
    EXPECT_EQ(position.token.token_id, prompt[traced.num_prompt_logprobs]);
  }
  ASSERT_EQ(event.logprobs.has_value(), event.token_id.has_value() && asked.logprobs.has_value());
  if (event.token_id.has_value() && request.resume_token_ids.empty()) {
    EXPECT_EQ(traced.num_prompt_logprobs,
              asked.prompt_logprobs.has_value() ? prompt.size() - 1 : 0);
  }
  if (!event.logprobs.has_value()) return;
  EXPECT_EQ(event.logprobs->token.token_id, *event.token_id);
  EXPECT_EQ(event.logprobs->token.logprob,
            static_cast<float>(prompt.size() + request.resume_token_ids.size() - 1 +
                               traced.tokens.size()));
}

void TraceRunner::CheckFinished(const TracedRequest& traced) {
  SCOPED_TRACE(testing::Message() << "request " << static_cast<std::uint64_t>(traced.request.id));
  if (traced.finish == FinishReason::kAborted) {
    EXPECT_TRUE(traced.cancelled);
  } else if (traced.finish == FinishReason::kDeadline) {
    EXPECT_LE(traced.request.deadline, At(tick_));
  } else {
    EXPECT_EQ(traced.finish, traced.expected_finish);
    EXPECT_EQ(traced.tokens, traced.expected_tokens);
    return;
  }
  ASSERT_LE(traced.tokens.size(), traced.expected_tokens.size());
  EXPECT_TRUE(
      std::equal(traced.tokens.begin(), traced.tokens.end(), traced.expected_tokens.begin()));
}

TEST(EngineTraceTest, TokensAreThoseOfThePlainComputation) {
  const char* rounds = std::getenv("WEFT_PROPERTY_ROUNDS");
  const std::uint64_t num_seeds = rounds == nullptr ? 2000 : std::strtoull(rounds, nullptr, 10);
  Coverage coverage;
  for (std::uint64_t seed = 0; seed < num_seeds; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    TraceRunner(DrawTrace(seed), seed).Run(coverage);
    if (HasFailure()) return;
  }
  for (FinishReason reason :
       {FinishReason::kStopToken, FinishReason::kEos, FinishReason::kLength, FinishReason::kAborted,
        FinishReason::kDeadline, FinishReason::kError}) {
    EXPECT_GT(coverage.finishes[reason], 0) << static_cast<int>(reason);
  }
  EXPECT_GT(coverage.preemptions, 0u);
  EXPECT_GT(coverage.references, 0);
  EXPECT_GT(coverage.prompt_logprobs, 0);
  EXPECT_GT(coverage.no_token_left, 0);
  EXPECT_GT(coverage.cache_hits, 0u);
  EXPECT_GT(coverage.evictions, 0u);
  EXPECT_GT(coverage.rewrites, 0);
  RecordProperty("steps", std::to_string(coverage.steps));
  RecordProperty("preemptions", std::to_string(coverage.preemptions));
}

}  // namespace
}  // namespace weft
