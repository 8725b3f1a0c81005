#include "worker/model/logits_processor.h"

#include <algorithm>
#include <cmath>
#include <limits>
#include <memory>
#include <random>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "tests/golden.h"

namespace weft {
namespace {

constexpr float kExcluded = -std::numeric_limits<float>::infinity();

using Random = std::mt19937_64;

std::int64_t Draw(Random& random, std::int64_t min, std::int64_t max) {
  return std::uniform_int_distribution<std::int64_t>(min, max)(random);
}

std::vector<std::int32_t> DrawTokens(Random& random, std::int64_t count, std::int32_t below) {
  std::vector<std::int32_t> tokens(count);
  for (std::int32_t& token : tokens) token = static_cast<std::int32_t>(Draw(random, 0, below - 1));
  return tokens;
}

LogitsParams DrawParams(Random& random, std::int32_t vocab) {
  const auto maybe = [&] { return Draw(random, 0, 1) == 0; };
  LogitsParams params;
  if (maybe()) params.presence_penalty = static_cast<float>(Draw(random, -20, 20)) / 10;
  if (maybe()) params.frequency_penalty = static_cast<float>(Draw(random, -20, 20)) / 10;
  if (maybe()) params.repetition_penalty = static_cast<float>(Draw(random, 1, 100)) / 10;
  if (maybe()) params.min_tokens = static_cast<std::int32_t>(Draw(random, 1, 20));
  params.ending_tokens = DrawTokens(random, 3, vocab);
  for (std::int64_t i = maybe() ? Draw(random, 1, 9) : 0; i > 0; --i) {
    params.logit_bias.push_back({static_cast<std::int32_t>(i * vocab / 10),
                                 static_cast<float>(Draw(random, -1000, 1000)) / 10});
  }
  if (maybe()) params.allowed_token_ids = DrawTokens(random, Draw(random, 1, vocab), vocab);
  // Of few ids, so that the output completes some of them.
  for (std::int64_t i = maybe() ? Draw(random, 1, 9) : 0; i > 0; --i) {
    params.bad_words.push_back(DrawTokens(random, Draw(random, 1, 4), 4));
  }
  return params;
}

// Plainly, over dense arrays, in vLLM's order.
std::vector<float> Reference(const LogitsParams& params, std::vector<float> logits,
                             const std::vector<std::int32_t>& prompt,
                             const std::vector<std::int32_t>& output) {
  const auto vocab = static_cast<std::int32_t>(logits.size());
  const auto count = [](const std::vector<std::int32_t>& ids, std::int32_t id) {
    return static_cast<float>(std::count(ids.begin(), ids.end(), id));
  };
  for (std::int32_t id = 0; id < vocab; ++id) {
    float& logit = logits[id];
    if (!params.allowed_token_ids.empty() && count(params.allowed_token_ids, id) == 0) {
      logit = kExcluded;
    }
    for (const std::vector<std::int32_t>& word : params.bad_words) {
      std::vector<std::int32_t> next = output;
      next.push_back(id);
      if (next.size() >= word.size() &&
          std::vector(next.end() - static_cast<std::ptrdiff_t>(word.size()), next.end()) == word) {
        logit = kExcluded;
      }
    }
    if (static_cast<std::int32_t>(output.size()) < params.min_tokens &&
        count(params.ending_tokens, id) > 0) {
      logit = kExcluded;
    }
    for (const auto& [biased, bias] : params.logit_bias) {
      if (biased == id) logit += bias;
    }
    if (count(prompt, id) + count(output, id) > 0) {
      logit = logit > 0 ? logit / params.repetition_penalty : logit * params.repetition_penalty;
    }
    logit -= params.frequency_penalty * count(output, id);
    if (count(output, id) > 0) logit -= params.presence_penalty;
  }
  return logits;
}

TEST(LogitsProcessorTest, EqualsBruteForceOnRealLogits) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  const Golden golden = LoadGolden(dir);
  const GoldenTensor& steps = golden.Tensor("step_logits.len7");
  const auto vocab = static_cast<std::int32_t>(steps.shape[1]);
  LogitsProcessor processor;  // reused: an earlier sequence must not show
  for (std::uint64_t seed = 0; seed < 500; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const LogitsParams params = DrawParams(random, vocab);
    const std::vector<std::int32_t> prompt = DrawTokens(random, Draw(random, 1, 40), vocab);
    std::vector<std::int32_t> known = prompt;
    std::vector<std::int32_t> output;
    // Some output is known at the start, as after a preemption.
    for (std::int32_t id : DrawTokens(random, Draw(random, 0, 8), 4)) {
      known.push_back(id);
      output.push_back(id);
    }
    processor.Start(std::make_shared<LogitsParams>(params), known,
                    static_cast<std::int32_t>(prompt.size()));
    for (std::int64_t step = 0; step < 12; ++step) {
      const auto row = steps.values.begin() + Draw(random, 0, 47) * vocab;
      const std::vector<float> raw(row, row + vocab);
      std::vector<float> got = raw;
      processor.Process(absl::MakeSpan(got));
      const std::vector<float> want = Reference(params, raw, prompt, output);
      for (std::int32_t id = 0; id < vocab; ++id) {
        ASSERT_FLOAT_EQ(got[id], want[id]) << "step " << step << " token " << id;
      }
      // Few ids here, too.
      output.push_back(static_cast<std::int32_t>(Draw(random, 0, step % 2 == 0 ? 3 : vocab - 1)));
      processor.Append(output.back());
    }
  }
}

TEST(LogitsProcessorTest, AClearedSlotHasNoParameters) {
  LogitsProcessor processor;
  EXPECT_EQ(processor.params(), nullptr);
  processor.Start(std::make_shared<LogitsParams>(), std::vector<std::int32_t>{1}, 1);
  EXPECT_NE(processor.params(), nullptr);
  processor.Clear();
  EXPECT_EQ(processor.params(), nullptr);
}

TEST(LogprobsOfTest, EqualsSortingEverything) {
  for (std::uint64_t seed = 0; seed < 300; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const auto vocab = static_cast<std::int32_t>(Draw(random, 1, 200));
    std::vector<float> logits(vocab);
    double sum = 0;
    for (float& logit : logits) {
      // Coarse logits have ties; some are excluded by the model itself.
      logit = Draw(random, 0, 9) == 0 ? kExcluded : static_cast<float>(Draw(random, -6, 6)) / 2;
      sum += std::exp(double{logit});
    }
    logits[0] = 1;
    sum += std::exp(1.0);
    std::vector<std::int32_t> order(vocab);
    for (std::int32_t id = 0; id < vocab; ++id) order[id] = id;
    std::stable_sort(order.begin(), order.end(),
                     [&](std::int32_t a, std::int32_t b) { return logits[a] > logits[b]; });
    const auto num_top = static_cast<std::int32_t>(Draw(random, 0, vocab));
    const auto rank = static_cast<std::int32_t>(Draw(random, 1, vocab));
    const PositionLogprobs got = LogprobsOf(logits, std::log(sum), order[rank - 1], num_top);
    EXPECT_EQ(got.token.token_id, order[rank - 1]);
    EXPECT_EQ(got.token.rank, rank);
    EXPECT_FLOAT_EQ(got.token.logprob, static_cast<float>(logits[order[rank - 1]] - std::log(sum)));
    ASSERT_EQ(got.top.size(), static_cast<std::size_t>(num_top));
    for (std::int32_t i = 0; i < num_top; ++i) {
      EXPECT_EQ(got.top[i].token_id, order[i]);
      EXPECT_EQ(got.top[i].rank, i + 1);
    }
  }
}

}  // namespace
}  // namespace weft
