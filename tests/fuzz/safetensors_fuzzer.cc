#include <cstddef>
#include <cstdint>

#include "server/base/check.h"
#include "worker/model/safetensors_header.h"

// A header that is accepted describes the file: the tensors tile the data.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const auto header =
      weft::ParseSafetensorsHeader({reinterpret_cast<const std::byte*>(data), size}, "file");
  if (!header.ok()) return 0;
  std::int64_t end = header->size;
  for (const weft::TensorEntry& tensor : header->tensors) {
    CHECK(tensor.begin == end && tensor.begin <= tensor.end);
    end = tensor.end;
    if (!tensor.dtype) continue;
    std::int64_t bytes = weft::DTypeBytes(*tensor.dtype);
    for (std::int64_t dim : tensor.shape) bytes *= dim;
    CHECK(bytes == tensor.end - tensor.begin);
  }
  CHECK(end == static_cast<std::int64_t>(size));
  return 0;
}
