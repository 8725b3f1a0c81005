// Sampling by a whole group: the right distribution, and the same tokens for the same seed whatever
// else runs and however the model is sharded.

#include <algorithm>
#include <cmath>
#include <numeric>
#include <string>
#include <vector>

#include "fmt/format.h"
#include "gtest/gtest.h"
#include "kernels/gumbel_argmax.h"
#include "tests/golden.h"
#include "tests/worker/local_group.h"
#include "tests/worker/reference_model.h"
#include "tests/worker/sampling_group.h"

namespace weft {
namespace {

EngineRequest Request(std::vector<std::int32_t> prompt, const SamplingParams& sampling,
                      std::int32_t max_tokens) {
  EngineRequest request;
  request.prompt_token_ids = std::move(prompt);
  request.max_tokens = max_tokens;
  request.ignore_eos = true;
  request.sampling = sampling;
  return request;
}

// The probability of every token, by sorting: temperature, top_k, top_p.
std::vector<double> Probabilities(const std::vector<float>& logits, const SamplingParams& params) {
  std::vector<std::int32_t> ids(logits.size());
  std::iota(ids.begin(), ids.end(), 0);
  std::stable_sort(ids.begin(), ids.end(),
                   [&](std::int32_t a, std::int32_t b) { return logits[a] > logits[b]; });
  if (params.top_k > 0) ids.resize(params.top_k);
  std::vector<double> probability(logits.size());
  const auto normalize = [&] {
    double sum = 0;
    for (std::int32_t id : ids) sum += probability[id];
    for (std::int32_t id : ids) probability[id] /= sum;
  };
  for (std::int32_t id : ids) {
    probability[id] = std::exp((double{logits[id]} - logits[ids[0]]) / params.temperature);
  }
  normalize();
  double reached = 0;
  std::size_t kept = 0;
  while (kept < ids.size() && reached < params.top_p) reached += probability[ids[kept++]];
  for (std::size_t i = kept; i < ids.size(); ++i) probability[ids[i]] = 0;
  ids.resize(kept);
  normalize();
  return probability;
}

// Chi-square, in standard deviations above what chance gives. Tokens too rare to be told from
// chance go together.
double Surprise(const std::vector<int>& counts, const std::vector<double>& probability, int draws) {
  double chi_square = 0;
  int bins = 0;
  double rare_expected = 0;
  double rare_seen = 0;
  const auto add = [&](double seen, double expected) {
    chi_square += (seen - expected) * (seen - expected) / expected;
    ++bins;
  };
  for (std::size_t id = 0; id < counts.size(); ++id) {
    const double expected = probability[id] * draws;
    if (expected >= 5) {
      add(counts[id], expected);
    } else {
      rare_expected += expected;
      rare_seen += counts[id];
    }
  }
  if (rare_expected >= 5) add(rare_seen, rare_expected);
  if (bins < 2) return 0;
  return (chi_square - (bins - 1)) / std::sqrt(2.0 * (bins - 1));
}

TEST(SamplingTest, FrequenciesAreTheFilteredSoftmax) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_mqa");
  const Golden golden = LoadGolden(dir);
  const std::vector<float>& logits = golden.Tensor("last_logits.len1").values;
  auto group = LocalGroup::Start(SamplingOptions(dir, 2, 2));
  ASSERT_TRUE(group.ok()) << group.status();
  constexpr int kDraws = 4000;
  constexpr int kBatch = 500;
  std::uint64_t seed = 0;
  for (const SamplingParams& params :
       std::vector<SamplingParams>{{},
                                   {.temperature = 0.7F},
                                   {.top_k = 7},
                                   {.top_p = 0.8F},
                                   {.temperature = 1.5F, .top_p = 0.6F},
                                   {.temperature = 1.7F, .top_p = 0.9F, .top_k = 25}}) {
    SCOPED_TRACE(fmt::format("temperature {} top_p {} top_k {}", params.temperature, params.top_p,
                             params.top_k));
    const std::vector<double> probability = Probabilities(logits, params);
    std::vector<int> counts(logits.size());
    for (int done = 0; done < kDraws; done += kBatch) {
      std::vector<EngineRequest> requests;
      for (int i = 0; i < kBatch; ++i) {
        SamplingParams sampling = params;
        sampling.seed = ++seed;
        requests.push_back(Request(golden.Prompt("len1").ids, sampling, 1));
      }
      for (const Completion& completion : (*group)->Generate(std::move(requests))) {
        ASSERT_TRUE(completion.status.ok()) << completion.status;
        const std::int32_t id = completion.token_ids.at(0);
        ++counts[id];
        EXPECT_GT(probability[id], 0) << "token " << id << " was filtered out";
      }
    }
    EXPECT_LT(Surprise(counts, probability, kDraws), 4);
    // The check itself: other frequencies are seen as such.
    SamplingParams other = params;
    other.temperature *= 1.3F;
    EXPECT_GT(Surprise(counts, Probabilities(logits, other), kDraws), 4);
  }
}

struct GroupRun {
  std::string name;
  LocalGroupOptions options;
  bool alone = false;  // one request after the other
};

std::vector<EngineRequest> ReproducibilityRequests(const Golden& golden) {
  std::vector<EngineRequest> requests;
  std::uint64_t seed = 1000;
  for (const SamplingParams& params :
       std::vector<SamplingParams>{{},
                                   {.temperature = 2},
                                   {.temperature = 2, .top_p = 0.9F},
                                   {.temperature = 1.5F, .top_k = 20}}) {
    for (const char* name : {"len1", "len7", "len33", "len130"}) {
      for (int i = 0; i < 3; ++i) {
        SamplingParams sampling = params;
        sampling.seed = ++seed;
        requests.push_back(Request(golden.Prompt(name).ids, sampling, 32));
      }
    }
  }
  return requests;
}

// How far apart, in score, the two tokens are that were drawn after `ids`: by the reference.
double ScoreGap(const ReferenceModel& reference, std::vector<std::int32_t> ids,
                const SamplingParams& params, std::int32_t a, std::int32_t b) {
  const std::vector<double> logits = reference.Logits(ids).back();
  const auto score = [&](std::int32_t id) {
    return logits[id] / params.temperature +
           kernels::GumbelNoise(params.seed, static_cast<std::int64_t>(ids.size()), id);
  };
  return std::abs(score(a) - score(b));
}

TEST(SamplingTest, TheSameSeedGivesTheSameTokensInEveryBatchAndLayout) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_mqa");
  const Golden golden = LoadGolden(dir);
  const std::vector<EngineRequest> requests = ReproducibilityRequests(golden);
  const ReferenceModel reference(dir, WeightFormat::kFloat32, DType::kFloat32);
  std::vector<GroupRun> runs;
  runs.push_back({.name = "alone", .options = SamplingOptions(dir, 1, 1), .alone = true});
  for (const auto& [tp, dcp] : {std::pair(1, 1), {2, 1}, {2, 2}, {4, 2}}) {
    runs.push_back(
        {.name = fmt::format("T={} N={}", tp, dcp), .options = SamplingOptions(dir, tp, dcp)});
    GroupRun preempted = runs.back();
    preempted.name += " preempted";
    preempted.options.force_preemption_every = 5;
    preempted.options.model.max_num_batched_tokens = 77;
    runs.push_back(std::move(preempted));
  }

  std::vector<std::vector<std::int32_t>> expected;
  std::int64_t compared = 0;
  int differences = 0;
  for (const GroupRun& run : runs) {
    SCOPED_TRACE(run.name);
    auto group = LocalGroup::Start(run.options);
    ASSERT_TRUE(group.ok()) << group.status();
    std::vector<Completion> completions;
    if (run.alone) {
      for (const EngineRequest& request : requests) {
        completions.push_back((*group)->Generate({request})[0]);
      }
    } else {
      completions = (*group)->Generate(requests);
    }
    int preemptions = 0;
    for (std::size_t i = 0; i < completions.size(); ++i) {
      const std::vector<std::int32_t>& tokens = completions[i].token_ids;
      ASSERT_TRUE(completions[i].status.ok()) << completions[i].status;
      ASSERT_EQ(tokens.size(), 32U);
      preemptions += completions[i].num_preemptions;
      if (run.alone) {
        expected.push_back(tokens);
        continue;
      }
      const auto at = std::mismatch(tokens.begin(), tokens.end(), expected[i].begin());
      const auto equal = at.first - tokens.begin();
      compared += std::min<std::int64_t>(equal + 1, 32);
      if (equal == 32) continue;
      // What follows a different token is another text.
      ++differences;
      const SamplingParams& sampling = requests[i].sampling;
      if (sampling.top_k > 0 || sampling.top_p < 1) continue;  // the filter's edge moved
      std::vector<std::int32_t> ids = requests[i].prompt_token_ids;
      ids.insert(ids.end(), tokens.begin(), at.first);
      EXPECT_LT(ScoreGap(reference, ids, sampling, *at.first, *at.second), 1e-3)
          << "request " << i << " token " << equal;
    }
    EXPECT_EQ(preemptions > 0, run.options.force_preemption_every > 0);
  }
  std::printf("%d differences in %lld tokens\n", differences, static_cast<long long>(compared));
  EXPECT_LE(differences, compared * 0.005);
}

}  // namespace
}  // namespace weft
