#include "worker/model/safetensors_header.h"

#include <algorithm>
#include <array>
#include <cstring>
#include <tuple>
#include <utility>

#include "fmt/format.h"
#include "server/base/status_macros.h"
#include "worker/model/json_reader.h"

namespace weft {
namespace {

using nlohmann::json;

// The format's own limit, which keeps a length that lies from costing memory.
constexpr std::uint64_t kMaxHeaderBytes = 100'000'000;
constexpr std::int64_t kLengthBytes = 8;

struct FileDType {
  std::string_view name;
  std::int64_t bits;
  std::optional<DType> dtype;
};

constexpr std::array kFileDTypes = {
    FileDType{"F32", 32, DType::kFloat32}, FileDType{"BF16", 16, DType::kBFloat16},
    FileDType{"F16", 16, DType::kFloat16}, FileDType{"F64", 64, std::nullopt},
    FileDType{"I64", 64, std::nullopt},    FileDType{"U64", 64, std::nullopt},
    FileDType{"I32", 32, std::nullopt},    FileDType{"U32", 32, std::nullopt},
    FileDType{"I16", 16, std::nullopt},    FileDType{"U16", 16, std::nullopt},
    FileDType{"I8", 8, std::nullopt},      FileDType{"U8", 8, std::nullopt},
    FileDType{"BOOL", 8, std::nullopt},    FileDType{"C64", 64, std::nullopt},
    FileDType{"F8_E4M3", 8, std::nullopt}, FileDType{"F8_E5M2", 8, std::nullopt},
    FileDType{"F8_E8M0", 8, std::nullopt}, FileDType{"F6_E2M3", 6, std::nullopt},
    FileDType{"F6_E3M2", 6, std::nullopt}, FileDType{"F4", 4, std::nullopt},
};

absl::Status Error(std::string_view where, std::string_view what) {
  return absl::InvalidArgumentError(fmt::format("{}: {}", where, what));
}

// A non-negative integer that fits in 63 bits.
std::optional<std::int64_t> AsCount(const json& value) {
  if (!value.is_number_unsigned()) return std::nullopt;
  const auto count = value.get<std::uint64_t>();
  if (count > static_cast<std::uint64_t>(INT64_MAX)) return std::nullopt;
  return static_cast<std::int64_t>(count);
}

// Both nullopt when `value` is not a list of counts.
std::optional<std::vector<std::int64_t>> AsCounts(const json& value) {
  if (!value.is_array()) return std::nullopt;
  std::vector<std::int64_t> counts;
  for (const json& element : value) {
    const std::optional<std::int64_t> count = AsCount(element);
    if (!count) return std::nullopt;
    counts.push_back(*count);
  }
  return counts;
}

// Bytes of a tensor; nullopt when that overflows or is no whole number.
std::optional<std::int64_t> SizeBytes(const std::vector<std::int64_t>& shape, std::int64_t bits) {
  std::int64_t total = bits;
  for (std::int64_t size : shape) {
    if (__builtin_mul_overflow(total, size, &total)) return std::nullopt;
  }
  if (total % 8 != 0) return std::nullopt;
  return total / 8;
}

absl::StatusOr<TensorEntry> ParseEntry(const std::string& name, const json& value,
                                       std::int64_t data_bytes, std::string_view where) {
  const std::string tensor = fmt::format("{}: tensor {}", where, Abbreviate(name));
  if (!value.is_object()) return Error(tensor, "its entry must be an object");
  for (const char* key : {"dtype", "shape", "data_offsets"}) {
    if (!value.contains(key)) return Error(tensor, fmt::format("its entry has no {}", key));
  }
  const auto known = std::find_if(kFileDTypes.begin(), kFileDTypes.end(),
                                  [&](const FileDType& d) { return value.at("dtype") == d.name; });
  if (known == kFileDTypes.end()) {
    return Error(tensor, fmt::format("dtype {} is not known; weights are F32, BF16 or F16",
                                     Abbreviate(value.at("dtype"))));
  }
  std::optional<std::vector<std::int64_t>> shape = AsCounts(value.at("shape"));
  if (!shape) {
    return Error(tensor, fmt::format("shape is {}; it must be a list of integers of at least 0",
                                     Abbreviate(value.at("shape"))));
  }
  const std::optional<std::int64_t> size = SizeBytes(*shape, known->bits);
  if (!size) {
    return Error(tensor, fmt::format("shape {} of {} is no number of bytes that a file can have",
                                     Abbreviate(value.at("shape")), known->name));
  }
  const std::string seen = Abbreviate(value.at("data_offsets"));
  const std::optional<std::vector<std::int64_t>> offsets = AsCounts(value.at("data_offsets"));
  if (!offsets || offsets->size() != 2 || (*offsets)[0] > (*offsets)[1] ||
      (*offsets)[1] > data_bytes) {
    return Error(tensor, fmt::format("data_offsets is {}; it must be [begin, end] with 0 <= begin "
                                     "<= end <= {}, the bytes of data in the file",
                                     seen, data_bytes));
  }
  if ((*offsets)[1] - (*offsets)[0] != *size) {
    return Error(tensor, fmt::format("data_offsets {} span {} bytes; shape {} of {} has {}", seen,
                                     (*offsets)[1] - (*offsets)[0], Abbreviate(value.at("shape")),
                                     known->name, *size));
  }
  return TensorEntry{.name = name,
                     .dtype_name = std::string(known->name),
                     .dtype = known->dtype,
                     .shape = *std::move(shape),
                     .begin = (*offsets)[0],
                     .end = (*offsets)[1]};
}

// Each byte of the data belongs to exactly one of `tensors`, which are sorted.
absl::Status CheckTiling(const std::vector<TensorEntry>& tensors, std::int64_t data_bytes,
                         std::string_view where) {
  for (std::size_t i = 1; i < tensors.size(); ++i) {
    if (tensors[i].begin < tensors[i - 1].end) {
      return Error(where,
                   fmt::format("tensors {} and {} share bytes", Abbreviate(tensors[i - 1].name),
                               Abbreviate(tensors[i].name)));
    }
  }
  std::int64_t end = 0;
  for (const TensorEntry& tensor : tensors) {
    if (tensor.begin != end) {
      return Error(where, fmt::format("{} bytes before tensor {} belong to no tensor",
                                      tensor.begin - end, Abbreviate(tensor.name)));
    }
    end = tensor.end;
  }
  if (end != data_bytes) {
    return Error(
        where, fmt::format("{} bytes after the last tensor belong to no tensor", data_bytes - end));
  }
  return absl::OkStatus();
}

absl::Status CheckMetadata(const json& metadata, std::string_view where) {
  const bool good =
      metadata.is_object() &&
      std::all_of(metadata.begin(), metadata.end(), [](const json& v) { return v.is_string(); });
  if (good) return absl::OkStatus();
  return Error(where, "__metadata__ must be an object of strings");
}

}  // namespace

absl::StatusOr<SafetensorsHeader> ParseSafetensorsHeader(absl::Span<const std::byte> file,
                                                         std::string_view where) {
  const auto file_bytes = static_cast<std::int64_t>(file.size());
  if (file_bytes < kLengthBytes) {
    return Error(where, fmt::format("the file has {} bytes; a safetensors file starts with an 8 "
                                    "byte header length",
                                    file_bytes));
  }
  std::uint64_t json_bytes = 0;
  std::memcpy(&json_bytes, file.data(), sizeof(json_bytes));
  if (json_bytes > kMaxHeaderBytes ||
      static_cast<std::int64_t>(json_bytes) > file_bytes - kLengthBytes) {
    return Error(where, fmt::format("the header length is {}; it must be at most {}, and the file "
                                    "has {} bytes after it",
                                    json_bytes, kMaxHeaderBytes, file_bytes - kLengthBytes));
  }
  const std::string_view text(reinterpret_cast<const char*>(file.data()) + kLengthBytes,
                              json_bytes);
  if (!text.starts_with('{')) return Error(where, "the header is not a JSON object");
  ASSIGN_OR_RETURN(const json object, ParseJson(text, fmt::format("{}: the header", where)));

  SafetensorsHeader header{.size = kLengthBytes + static_cast<std::int64_t>(json_bytes)};
  const std::int64_t data_bytes = file_bytes - header.size;
  for (const auto& item : object.items()) {
    if (item.key() == "__metadata__") {
      RETURN_IF_ERROR(CheckMetadata(item.value(), where));
      continue;
    }
    ASSIGN_OR_RETURN(TensorEntry entry, ParseEntry(item.key(), item.value(), data_bytes, where));
    header.tensors.push_back(std::move(entry));
  }
  std::sort(header.tensors.begin(), header.tensors.end(), [](const auto& a, const auto& b) {
    return std::tie(a.begin, a.end, a.name) < std::tie(b.begin, b.end, b.name);
  });
  RETURN_IF_ERROR(CheckTiling(header.tensors, data_bytes, where));
  for (TensorEntry& tensor : header.tensors) {
    tensor.begin += header.size;
    tensor.end += header.size;
  }
  return header;
}

}  // namespace weft
