#pragma once

#include <cstdint>
#include <filesystem>
#include <map>
#include <string>
#include <vector>

#include "absl/types/span.h"
#include "kernels/dtype.h"
#include "worker/model/model_config.h"

namespace weft {

// A Llama forward pass in plain loops and double precision, with matrices rounded to one storage
// type and K and V to another: what a precision costs by itself.
class ReferenceModel {
 public:
  ReferenceModel(const std::filesystem::path& dir, DType weights, DType kv);

  // Logits after each token: [tokens][vocab].
  std::vector<std::vector<double>> Logits(absl::Span<const std::int32_t> token_ids) const;

 private:
  using Vector = std::vector<double>;

  Vector Multiply(const std::string& name, const Vector& x) const;
  Vector Norm(const std::string& name, const Vector& x) const;
  void Rotate(std::int64_t position, int num_heads, Vector& x) const;
  Vector Attend(const Vector& q, const std::vector<Vector>& k, const std::vector<Vector>& v) const;
  Vector Attention(const std::string& layer, const Vector& x, std::vector<Vector>& k,
                   std::vector<Vector>& v) const;
  Vector Mlp(const std::string& layer, const Vector& x) const;

  ModelConfig config_;
  DType kv_;
  RopeFrequencies rope_;
  std::map<std::string, std::vector<float>, std::less<>> tensors_;
};

}  // namespace weft
