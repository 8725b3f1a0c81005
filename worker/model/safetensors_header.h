#pragma once

#include <cstddef>
#include <cstdint>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "kernels/dtype.h"

namespace weft {

// One entry of a safetensors header, checked against the file.
struct TensorEntry {
  std::string name;
  std::string dtype_name;      // "BF16"
  std::optional<DType> dtype;  // nullopt: a legal dtype that weights do not have
  std::vector<std::int64_t> shape;
  std::int64_t begin = 0;  // byte range in the file
  std::int64_t end = 0;
};

struct SafetensorsHeader {
  std::vector<TensorEntry> tensors;  // by byte range
  std::int64_t size = 0;             // bytes before the first tensor's
};

// Reads and checks the header of a whole file: 8 bytes of length, that many of JSON, then data that
// the tensors tile without overlap or gap. INVALID_ARGUMENT names `where`, tensor and value.
absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::Span<const std::byte> file,
                                                         std::string_view where);

}  // namespace weft
