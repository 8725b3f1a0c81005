// Each sampling field by a whole group against a plain reference on real logits, and the same
// tokens and log-probabilities however the request is run: sharded, in chunks, preempted, resumed.

#include <cmath>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "tests/golden.h"
#include "tests/worker/local_group.h"
#include "tests/worker/reference_model.h"
#include "tests/worker/sampling_group.h"
#include "tests/worker/sampling_reference.h"

namespace weft {
namespace {

// Two tokens whose scores are closer than this may change places by rounding.
constexpr double kRounding = 1e-3;
constexpr std::int32_t kMaxTokens = 40;

// Small chunks, few rows with logits, and preemptions all along.
LocalGroupOptions Disturbed(LocalGroupOptions options) {
  options.model.max_num_batched_tokens = 13;
  options.model.max_num_seqs = 5;
  options.force_preemption_every = 4;
  return options;
}

struct Field {
  std::string name;
  LogitsParams logits;
  SamplingParams sampling;  // its temperature is set by the test
  std::vector<std::int32_t> stop_token_ids;
};

std::vector<Field> Fields(const std::vector<std::int32_t>& greedy, std::int32_t eos) {
  std::vector<std::int32_t> allowed;
  for (std::int32_t id = 0; id < 320; id += 3) allowed.push_back(id);
  const std::vector<std::int32_t> ending = {eos, greedy[3]};
  return {{"nothing", {}, {}, {}},
          {"presence_penalty", {.presence_penalty = 1.5F}, {}, {}},
          {"negative presence_penalty", {.presence_penalty = -2}, {}, {}},
          {"frequency_penalty", {.frequency_penalty = 0.9F}, {}, {}},
          {"negative frequency_penalty", {.frequency_penalty = -2}, {}, {}},
          {"repetition_penalty", {.repetition_penalty = 1.8F}, {}, {}},
          {"repetition_penalty below 1", {.repetition_penalty = 0.6F}, {}, {}},
          {"logit_bias", {.logit_bias = {{greedy[0], -100}, {greedy[1], 3.5F}, {7, 2}}}, {}, {}},
          {"allowed_token_ids", {.allowed_token_ids = allowed}, {}, {}},
          {"bad_words",
           {.bad_words = {{greedy[0], greedy[1]}, {greedy[2]}, {greedy[4], greedy[5], greedy[6]}}},
           {},
           {}},
          {"min_tokens", {.min_tokens = 9, .ending_tokens = ending}, {}, {greedy[3]}},
          {"min_p", {}, {.min_p = 0.2F}, {}},
          {"min_p, top_k and top_p", {}, {.top_p = 0.9F, .top_k = 12, .min_p = 0.05F}, {}},
          {"all",
           {.presence_penalty = 0.4F,
            .frequency_penalty = 0.3F,
            .repetition_penalty = 1.2F,
            .min_tokens = 5,
            .ending_tokens = ending,
            .logit_bias = {{greedy[1], 1}, {11, 4}},
            .allowed_token_ids = allowed,
            .bad_words = {{3, 6}, {9}},
            .logprobs = 2},
           {.top_p = 0.95F, .top_k = 40, .min_p = 0.02F},
           {greedy[3]}}};
}

std::vector<EngineRequest> RequestsOf(const Golden& golden, std::int32_t eos,
                                      std::vector<std::string>& names) {
  std::vector<EngineRequest> requests;
  std::uint64_t seed = 500;
  for (const char* prompt : {"len7", "len33"}) {
    for (const Field& field : Fields(golden.Prompt(prompt).greedy, eos)) {
      for (float temperature : {0.0F, 1.3F}) {
        EngineRequest& request = requests.emplace_back();
        request.prompt_token_ids = golden.Prompt(prompt).ids;
        request.max_tokens = kMaxTokens;
        request.eos_token_ids = {eos};
        request.stop_token_ids = field.stop_token_ids;
        request.sampling = field.sampling;
        request.sampling.temperature = temperature;
        request.sampling.seed = ++seed;
        LogitsParams logits = field.logits;
        if (!logits.logprobs.has_value()) logits.logprobs = 3;
        logits.prompt_logprobs = 2;
        request.logits = std::make_shared<const LogitsParams>(std::move(logits));
        names.push_back(fmt::format("{} {} temperature {}", prompt, field.name, temperature));
      }
    }
  }
  return requests;
}

void ExpectNear(const TokenLogprob& got, const std::vector<double>& logprobs) {
  EXPECT_NEAR(got.logprob, logprobs[got.token_id], kRounding);
  int surely_before = 0;
  int maybe_before = 0;
  for (double other : logprobs) {
    surely_before += other > logprobs[got.token_id] + kRounding;
    maybe_before += other > logprobs[got.token_id] - kRounding;
  }
  EXPECT_GT(got.rank, surely_before);
  EXPECT_LE(got.rank, maybe_before);
}

// `position` is of `token_id`, after logits of which `logprobs` are the log-softmax.
void ExpectLogprobs(const PositionLogprobs& position, std::int32_t token_id, std::size_t num_top,
                    const std::vector<double>& logprobs) {
  EXPECT_EQ(position.token.token_id, token_id);
  ExpectNear(position.token, logprobs);
  ASSERT_EQ(position.top.size(), num_top);
  for (std::size_t i = 0; i < num_top; ++i) {
    EXPECT_EQ(position.top[i].rank, static_cast<std::int32_t>(i) + 1);
    ExpectNear(position.top[i], logprobs);
  }
}

// Every token is the one that the reference chooses after those before it.
void ExpectReferences(const ReferenceModel& model, const EngineRequest& request,
                      const Completion& completion) {
  ASSERT_TRUE(completion.status.ok()) << completion.status;
  const std::vector<std::int32_t>& output = completion.token_ids;
  const std::size_t num_prompt = request.prompt_token_ids.size();
  std::vector<std::int32_t> ids = request.prompt_token_ids;
  ids.insert(ids.end(), output.begin(), output.end());
  const std::vector<std::vector<double>> logits = model.Logits(ids);

  ASSERT_EQ(completion.logprobs.size(), output.size());
  for (std::size_t i = 0; i < output.size(); ++i) {
    SCOPED_TRACE(fmt::format("token {}", i));
    const SamplingReference reference(request, logits[num_prompt + i - 1],
                                      absl::MakeConstSpan(output).first(i));
    const std::int32_t want = reference.Token();
    if (output[i] != want) {
      EXPECT_LT(reference.scores()[want] - reference.scores()[output[i]], kRounding)
          << output[i] << " instead of " << want;
    }
    ExpectLogprobs(completion.logprobs[i], output[i], *request.logits->logprobs,
                   reference.logprobs());
  }
  ASSERT_EQ(completion.prompt_logprobs.size(), num_prompt - 1);
  for (std::size_t i = 1; i < num_prompt; ++i) {
    SCOPED_TRACE(fmt::format("prompt token {}", i));
    ExpectLogprobs(completion.prompt_logprobs[i - 1], ids[i], 2,
                   SamplingReference(request, logits[i - 1], {}).logprobs());
  }
}

void ExpectEnd(const EngineRequest& request, const Completion& completion) {
  const std::vector<std::int32_t>& output = completion.token_ids;
  const auto is_end = [&](std::int32_t id) {
    return id == request.eos_token_ids[0] ||
           (!request.stop_token_ids.empty() && id == request.stop_token_ids[0]);
  };
  for (std::size_t i = 0; i < output.size(); ++i) {
    if (!is_end(output[i])) continue;
    EXPECT_GE(static_cast<int>(i), request.logits->min_tokens);
    EXPECT_EQ(i + 1, output.size());
  }
  const FinishReason want = output.back() == request.eos_token_ids[0] ? FinishReason::kEos
                            : is_end(output.back())                   ? FinishReason::kStopToken
                                                                      : FinishReason::kLength;
  EXPECT_EQ(completion.finish, want);
  if (want == FinishReason::kLength) {
    EXPECT_EQ(output.size(), std::size_t{kMaxTokens});
  }
}

bool SameLogprobs(const std::vector<PositionLogprobs>& a, const std::vector<PositionLogprobs>& b) {
  if (a.size() != b.size()) return false;
  for (std::size_t i = 0; i < a.size(); ++i) {
    if (a[i].token.token_id != b[i].token.token_id || a[i].top.size() != b[i].top.size() ||
        std::abs(a[i].token.logprob - b[i].token.logprob) > 1e-4) {
      return false;
    }
  }
  return true;
}

class SamplingFieldsTest : public ::testing::Test {
 protected:
  void SetUp() override {
    WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
    dir_ = dir;
    golden_ = LoadGolden(dir);
    eos_ = LoadModelConfig(dir)->eos_token_ids.at(0);
    requests_ = RequestsOf(golden_, eos_, names_);
  }

  std::vector<Completion> RunAll(const LocalGroupOptions& options,
                                 std::vector<EngineRequest> requests) {
    auto group = LocalGroup::Start(options);
    EXPECT_TRUE(group.ok()) << group.status();
    return (*group)->Generate(std::move(requests));
  }

  std::filesystem::path dir_;
  Golden golden_;
  std::int32_t eos_ = 0;
  std::vector<std::string> names_;
  std::vector<EngineRequest> requests_;
};

TEST_F(SamplingFieldsTest, TokensAndLogprobsAreThePlainReferences) {
  const ReferenceModel model(dir_, WeightFormat::kFloat32, DType::kFloat32);
  const std::vector<Completion> completions = RunAll(SamplingOptions(dir_, 1, 1), requests_);
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    SCOPED_TRACE(names_[i]);
    ExpectReferences(model, requests_[i], completions[i]);
    ExpectEnd(requests_[i], completions[i]);
    if (HasFatalFailure()) return;
  }
  // The fields do something here: else the comparison says little. min_p is nothing when greedy.
  const std::size_t half = requests_.size() / 2;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const bool greedy = requests_[i].sampling.temperature == 0;
    const std::size_t plain = i / half * half + (greedy ? 0 : 1);
    if (i == plain || names_[i].find("min_p") != std::string::npos) continue;
    if (!greedy) continue;  // other seeds anyway
    EXPECT_NE(completions[i].token_ids, completions[plain].token_ids) << names_[i];
  }
}

TEST_F(SamplingFieldsTest, LayoutChunksAndPreemptionChangeNothing) {
  const std::vector<Completion> want = RunAll(SamplingOptions(dir_, 1, 1), requests_);
  for (const auto& [tp, dcp, async] : {std::tuple(1, 1, true), {2, 2, true}, {2, 2, false}}) {
    LocalGroupOptions options = Disturbed(SamplingOptions(dir_, tp, dcp));
    options.async_scheduling = async;
    const std::vector<Completion> got = RunAll(options, requests_);
    int preemptions = 0;
    for (std::size_t i = 0; i < requests_.size(); ++i) {
      SCOPED_TRACE(fmt::format("T={} N={} {}", tp, dcp, names_[i]));
      ASSERT_TRUE(got[i].status.ok()) << got[i].status;
      EXPECT_EQ(got[i].token_ids, want[i].token_ids);
      EXPECT_EQ(got[i].finish, want[i].finish);
      EXPECT_TRUE(SameLogprobs(got[i].logprobs, want[i].logprobs));
      EXPECT_TRUE(SameLogprobs(got[i].prompt_logprobs, want[i].prompt_logprobs));
      preemptions += got[i].num_preemptions;
    }
    EXPECT_GT(preemptions, 20);
  }
}

TEST_F(SamplingFieldsTest, AResumedRequestGoesOnAsIfItHadNotStopped) {
  const std::vector<Completion> want = RunAll(SamplingOptions(dir_, 1, 1), requests_);
  std::vector<EngineRequest> resumed;
  std::vector<std::size_t> from;
  for (std::size_t i = 0; i < requests_.size(); ++i) {
    const auto& tokens = want[i].token_ids;
    resumed.push_back(requests_[i]);
    from.push_back(std::min<std::size_t>(1 + i % 11, tokens.size() - 1));
    resumed.back().resume_token_ids.assign(tokens.begin(), tokens.begin() + from.back());
  }
  const std::vector<Completion> got =
      RunAll(Disturbed(SamplingOptions(dir_, 2, 2)), std::move(resumed));
  for (std::size_t i = 0; i < got.size(); ++i) {
    SCOPED_TRACE(names_[i]);
    ASSERT_TRUE(got[i].status.ok()) << got[i].status;
    const auto& tokens = want[i].token_ids;
    EXPECT_EQ(got[i].token_ids, std::vector(tokens.begin() + from[i], tokens.end()));
    EXPECT_EQ(got[i].finish, want[i].finish);
    EXPECT_TRUE(got[i].prompt_logprobs.empty());
  }
}

TEST_F(SamplingFieldsTest, SamplesOfSuccessiveSeedsDifferAndAreReproducible) {
  std::vector<EngineRequest> samples;
  for (std::uint64_t i = 0; i < 8; ++i) {
    EngineRequest& request = samples.emplace_back();
    request.prompt_token_ids = golden_.Prompt("len33").ids;
    request.sampling.seed = 77 + i;
  }
  const std::vector<Completion> together = RunAll(SamplingOptions(dir_, 1, 1), samples);
  auto group = LocalGroup::Start(Disturbed(SamplingOptions(dir_, 2, 2)));
  ASSERT_TRUE(group.ok()) << group.status();
  for (std::size_t i = 0; i < samples.size(); ++i) {
    EXPECT_EQ((*group)->Generate({samples[i]})[0].token_ids, together[i].token_ids);
    for (std::size_t j = 0; j < i; ++j) {
      EXPECT_NE(together[i].token_ids, together[j].token_ids) << i << " and " << j;
    }
  }
}

TEST_F(SamplingFieldsTest, ARequestThatExcludesEveryTokenEndsAlone) {
  EngineRequest none;
  none.prompt_token_ids = {1, 2};
  none.logits = std::make_shared<LogitsParams>(
      LogitsParams{.allowed_token_ids = {4, 5}, .bad_words = {{4, 4}, {4, 5}, {5}}, .logprobs = 1});
  EngineRequest other;
  other.prompt_token_ids = golden_.Prompt("len7").ids;
  other.max_tokens = 48;
  other.sampling.temperature = 0;
  const std::vector<Completion> completions = RunAll(SamplingOptions(dir_, 2, 2), {none, other});
  EXPECT_EQ(completions[0].token_ids, std::vector<std::int32_t>{4});
  EXPECT_EQ(completions[0].status.code(), absl::StatusCode::kInvalidArgument);
  EXPECT_EQ(completions[1].token_ids, golden_.Prompt("len7").greedy);
}

}  // namespace
}  // namespace weft
