#include <string>
#include <vector>

#include "gtest/gtest.h"
#include "worker/model/model_config.h"

namespace weft {
namespace {

// What transformers 5.24's own functions (modeling_rope_utils.py, run on numpy's float32) give:
// all frequencies, or the values at `pairs`.
struct Reference {
  const char* name;
  RopeConfig config;
  std::int32_t rotary_dim;
  double attention_scaling;
  std::vector<std::int32_t> pairs;
  std::vector<double> inv_freq;
};

const std::vector<std::int32_t> kAll = {};

const Reference kReferences[] = {
    {"linear",
     {.type = RopeType::kLinear, .factor = 2.5},
     16,
     1.0,
     kAll,
     {4e-01, 1.264911e-01, 4e-02, 1.2649111e-02, 3.9999997e-03, 1.2649111e-03, 4.0000002e-04,
      1.2649111e-04}},
    {"llama-3.1",
     {.type = RopeType::kLlama3,
      .theta = 500000.0,
      .factor = 8.0,
      .low_freq_factor = 1.0,
      .high_freq_factor = 4.0,
      .original_max_position_embeddings = 8192},
     128,
     1.0,
     {0, 1, 27, 28, 29, 30, 31, 32, 33, 34, 35, 36, 63},
     {1.0, 8.146172e-01, 3.942276e-03, 3.211446e-03, 2.1665706e-03, 1.3718937e-03, 8.5675146e-04,
      5.24846e-04, 3.1269365e-04, 1.7850779e-04, 9.556212e-05, 7.7846555e-05, 3.068926e-07}},
    {"llama-3.2",
     {.type = RopeType::kLlama3,
      .theta = 500000.0,
      .factor = 32.0,
      .low_freq_factor = 1.0,
      .high_freq_factor = 4.0,
      .original_max_position_embeddings = 8192},
     64,
     1.0,
     {13, 14, 15, 16, 17, 18, 31},
     {4.8394212e-03, 3.211446e-03, 1.290548e-03, 4.295567e-04, 9.708286e-05, 1.9461639e-05,
      9.4183065e-08}},
    {"yarn with defaults",
     {.type = RopeType::kYarn, .factor = 16.0, .original_max_position_embeddings = 4096},
     32,
     1.2772588722239782,
     kAll,
     {1.0, 5.6234133e-01, 3.1622776e-01, 1.7782794e-01, 1e-01, 5.623413e-02, 2.7387584e-02,
      1.3019547e-02, 5.9821424e-03, 2.6108704e-03, 1.0446811e-03, 3.4930487e-04, 6.25e-05,
      3.514633e-05, 1.9764237e-05, 1.1114246e-05}},
    {"yarn with unequal mscales",
     {.type = RopeType::kYarn,
      .factor = 40.0,
      .mscale = 1.0,
      .mscale_all_dim = 0.707,
      .original_max_position_embeddings = 4096},
     64,
     1.0857263992561355,
     {0, 10, 11, 16, 20, 21, 22, 23, 24, 31},
     {1.0, 5.623413e-02, 3.9006926e-02, 5.5000004e-03, 7.905694e-04, 4.149904e-04, 1.7782794e-04,
      3.3338034e-05, 2.5e-05, 3.3338035e-06}},
    {"yarn with attention_factor, not truncated",
     {.type = RopeType::kYarn,
      .factor = 4.0,
      .beta_fast = 8.0,
      .beta_slow = 2.0,
      .attention_factor = 1.25,
      .truncate = false,
      .original_max_position_embeddings = 64},
     16,
     1.25,
     kAll,
     {1.0, 1.6058916e-01, 2.5e-02, 7.905695e-03, 2.5e-03, 7.9056947e-04, 2.5e-04, 7.905695e-05}},
    {"yarn with equal betas (Kimi-K2)",
     {.type = RopeType::kYarn,
      .theta = 50000.0,
      .factor = 64.0,
      .beta_fast = 1.0,
      .beta_slow = 1.0,
      .mscale = 1.0,
      .mscale_all_dim = 1.0,
      .original_max_position_embeddings = 4096},
     64,
     1.0,
     {0, 1, 18, 19, 20, 21, 31},
     {1.0, 7.131111e-01, 2.2742038e-03, 1.62176e-03, 1.8070234e-05, 1.2886084e-05, 4.3822064e-07}},
};

TEST(RopeFrequenciesTest, EqualTheReferencesToRounding) {
  for (const Reference& reference : kReferences) {
    SCOPED_TRACE(reference.name);
    const RopeFrequencies got = ComputeRopeFrequencies(reference.config, reference.rotary_dim);
    ASSERT_EQ(got.inv_freq.size(), static_cast<std::size_t>(reference.rotary_dim / 2));
    EXPECT_FLOAT_EQ(got.attention_scaling, static_cast<float>(reference.attention_scaling));
    for (std::size_t i = 0; i < reference.inv_freq.size(); ++i) {
      const std::size_t pair = reference.pairs.empty() ? i : reference.pairs[i];
      EXPECT_NEAR(got.inv_freq[pair] / reference.inv_freq[i], 1.0, 4e-7) << "pair " << pair;
    }
  }
}

TEST(RopeFrequenciesTest, DefaultIsAPowerOfTheta) {
  const RopeFrequencies got = ComputeRopeFrequencies({.theta = 10000.0}, 8);
  EXPECT_EQ(got.attention_scaling, 1.0f);
  ASSERT_EQ(got.inv_freq.size(), 4u);
  EXPECT_FLOAT_EQ(got.inv_freq[0], 1.0f);
  EXPECT_FLOAT_EQ(got.inv_freq[1], 0.1f);
  EXPECT_FLOAT_EQ(got.inv_freq[2], 0.01f);
  EXPECT_FLOAT_EQ(got.inv_freq[3], 0.001f);
}

}  // namespace
}  // namespace weft
