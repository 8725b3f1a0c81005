#pragma once

#include <cstddef>
#include <cstdint>
#include <filesystem>
#include <map>
#include <memory>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/dtype.h"
#include "kernels/linear.h"

namespace weft {

// A tensor in a mapped file.
struct TensorView {
  std::string_view name;
  std::string_view file;  // for messages
  DType dtype = DType::kFloat32;
  bool is_weight_dtype = true;  // false for a legal dtype that cannot be a weight, such as I64
  std::string_view dtype_name;  // as the file says, "BF16"
  std::vector<std::int64_t> shape;
  absl::Span<const std::byte> data;  // row-major, little-endian; need not be aligned
};

// The tensors of a HF checkpoint: MODEL_DIR/model.safetensors, or the shards that
// model.safetensors.index.json names (the former when both are there). Files are memory-mapped,
// read-only and stay mapped as long as this lives. Headers are checked whole before anything is
// used: lengths, offsets (the tensors tile the data: no overlap, no gap, nothing after the last),
// shapes against bytes, and the index against the shards.
//
// Threading: immutable after Open().
class Checkpoint {
 public:
  // NOT_FOUND for a missing file, INVALID_ARGUMENT for a malformed one; names file, tensor, value.
  static absl::StatusOr<std::unique_ptr<Checkpoint>> Open(const std::filesystem::path& model_dir);
  ~Checkpoint();

  bool Has(std::string_view name) const;

  // The tensor with exactly `shape` and a float dtype. NOT_FOUND when absent, INVALID_ARGUMENT when
  // its shape or dtype differs: the message has tensor, file, what was found and what was expected.
  // The view is good as long as this lives.
  absl::StatusOr<TensorView> Find(std::string_view name,
                                  absl::Span<const std::int64_t> shape) const;

  // Rows [row_begin, row_end) of a [rows, cols] tensor / columns [col_begin, col_end) of it. Fails
  // as Find() does; the range must lie in the tensor.
  absl::StatusOr<kernels::MatrixView> Rows(std::string_view name, std::int64_t rows,
                                           std::int64_t cols, std::int64_t row_begin,
                                           std::int64_t row_end) const;
  absl::StatusOr<kernels::MatrixView> Columns(std::string_view name, std::int64_t rows,
                                              std::int64_t cols, std::int64_t col_begin,
                                              std::int64_t col_end) const;
  // A [size] tensor's elements [begin, end) as fp32 (norm weights, biases). FAILED_PRECONDITION,
  // naming tensor and index, for a NaN or infinite value.
  absl::StatusOr<std::vector<float>> Vector(std::string_view name, std::int64_t size,
                                            std::int64_t begin, std::int64_t end) const;

  // Lets go of the memory that reading has brought in; what is read later is read from the files
  // again. Without it a rank would hold the whole checkpoint beside its packed weights.
  void ReleasePages() const;

  // Names of all tensors, sorted.
  std::vector<std::string_view> Names() const;
  std::int64_t total_bytes() const;

  // A hash of every file's name, size and header and of the first bytes of every tensor: equal on
  // all ranks that have the same checkpoint (the join checks it), and different for another
  // training run of the same model.
  std::uint64_t fingerprint() const { return fingerprint_; }

 private:
  struct File;
  Checkpoint();
  absl::Status Add(std::unique_ptr<File> file, std::string_view name);
  std::vector<std::unique_ptr<File>> files_;
  std::map<std::string_view, TensorView> tensors_;
  std::uint64_t fingerprint_ = 0xcbf29ce484222325;
};

}  // namespace weft
