#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <optional>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/device/cpu_target.h"
#include "kernels/dtype.h"
#include "tests/golden.h"
#include "worker/model/model_config.h"

namespace weft {

// A forward pass of any family in plain loops and double precision, with matrices rounded to one
// storage format, what is cached of a token to a type, and where `rounds` inputs of products as
// kernels with dot products do (kernels/linear.h; with a dtype of bfloat16 those of attention, too,
// see kernels/attention.h): what a precision costs by itself. With
// integers, routers and the up-projections of latents are float32, as LoadDecoderWeights() says of
// a float32 model. Biases,
// norms and experts are there where the checkpoint has them; MLA is decompressed.
class ReferenceModel {
 public:
  // `dtype`: the model's; absent: the weights', or float32 with integers. `rounds`: see above.
  ReferenceModel(const std::filesystem::path& dir, WeightFormat weights, DType kv,
                 std::optional<DType> dtype = std::nullopt,
                 bool rounds = kernels::HasDotProducts());

  // Logits after each token: [tokens][vocab].
  std::vector<std::vector<double>> Logits(absl::Span<const std::int32_t> token_ids) const;

 private:
  using Vector = std::vector<double>;
  // Of one layer, a token each; with MLA k is [latent | rotary key], and v is empty.
  struct Cache {
    std::vector<Vector> k;
    std::vector<Vector> v;
  };

  bool Has(const std::string& name) const { return tensors_.contains(name); }
  // W x, and its bias.
  Vector Linear(const std::string& name, const Vector& x) const;
  // Of x[begin, begin + weight size).
  void Norm(const std::string& name, double eps, std::size_t begin, Vector& x) const;
  Vector Normed(const std::string& name, Vector x) const;
  void Rotate(std::int64_t position, std::size_t begin, Vector& x) const;
  Vector Rounded(Vector x) const;

  Vector Attention(const std::string& layer, int index, const Vector& x, Cache& cache) const;
  Vector LatentAttention(const std::string& layer, const Vector& x, Cache& cache) const;
  Vector Mlp(const std::string& gate, const std::string& up, const std::string& down,
             const Vector& x) const;
  Vector Experts(const std::string& block, const Vector& x) const;
  Vector Feed(const std::string& layer, int index, const Vector& x) const;

  ModelConfig config_;
  WeightFormat weights_;
  bool round_inputs_;
  bool round_attention_;
  DType kv_;
  RopeFrequencies rope_;
  std::map<std::string, GoldenTensor> tensors_;
};

}  // namespace weft
