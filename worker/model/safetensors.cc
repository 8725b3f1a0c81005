#include "worker/model/safetensors.h"

#include <fcntl.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <unistd.h>

#include <algorithm>
#include <cerrno>
#include <cmath>
#include <fstream>
#include <limits>
#include <set>
#include <system_error>
#include <utility>

#include "fmt/format.h"
#include "kernels/cpu/convert.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"
#include "worker/model/json_reader.h"
#include "worker/model/safetensors_header.h"

namespace weft {
namespace {

constexpr char kSingleFile[] = "model.safetensors";
constexpr char kIndexFile[] = "model.safetensors.index.json";
constexpr std::int64_t kMaxIndexBytes = 256 << 20;
constexpr std::size_t kFingerprintBytes = 64;  // of every tensor

// FNV-1a of `size` bytes, continued from `hash`.
std::uint64_t HashOn(std::uint64_t hash, const void* data, std::size_t size) {
  for (std::size_t i = 0; i < size; ++i) {
    hash = (hash ^ static_cast<const unsigned char*>(data)[i]) * 0x100000001b3;
  }
  return hash;
}

absl::Status FileError(const std::filesystem::path& path, int error) {
  const std::string message =
      fmt::format("{}: {}", path.string(), std::generic_category().message(error));
  return error == ENOENT || error == ENOTDIR ? absl::NotFoundError(message)
                                             : absl::InvalidArgumentError(message);
}

// Tensor -> the file it is in, as model.safetensors.index.json has it.
using WeightMap = std::map<std::string, std::string>;

// The path stays in the directory. A shard may be a symbolic link that leads out of it: model
// caches are built so.
bool StaysInside(const std::filesystem::path& path) {
  if (path.empty() || path.is_absolute()) return false;
  return std::none_of(path.begin(), path.end(),
                      [](const std::filesystem::path& part) { return part == ".."; });
}

absl::StatusOr<WeightMap> ReadIndex(const std::filesystem::path& path) {
  ASSIGN_OR_RETURN(const nlohmann::json index, ReadJsonObject(path, kMaxIndexBytes));
  const auto weight_map = index.find("weight_map");
  if (weight_map == index.end() || !weight_map->is_object() || weight_map->empty()) {
    return absl::InvalidArgumentError(fmt::format(
        "{}: weight_map must be an object that names each tensor's file", path.string()));
  }
  WeightMap files;
  for (const auto& item : weight_map->items()) {
    if (!item.value().is_string() || !StaysInside(item.value().get<std::string>())) {
      return absl::InvalidArgumentError(
          fmt::format("{}: weight_map says that {} is in {}; it must be a file in the directory",
                      path.string(), Abbreviate(item.key()), Abbreviate(item.value())));
    }
    files[item.key()] = item.value().get<std::string>();
  }
  return files;
}

std::int32_t Narrow(std::int64_t value) {
  CHECK(value >= 0 && value <= std::numeric_limits<std::int32_t>::max());
  return static_cast<std::int32_t>(value);
}

}  // namespace

// A mapped file and its header.
struct Checkpoint::File {
  std::string path;
  absl::Span<const std::byte> bytes;
  SafetensorsHeader header;

  File() = default;
  File(const File&) = delete;
  File& operator=(const File&) = delete;
  ~File() {
    if (!bytes.empty()) munmap(const_cast<std::byte*>(bytes.data()), bytes.size());
  }

  static absl::StatusOr<std::unique_ptr<File>> Map(const std::filesystem::path& path);
};

absl::StatusOr<std::unique_ptr<Checkpoint::File>> Checkpoint::File::Map(
    const std::filesystem::path& path) {
  auto file = std::make_unique<File>();
  file->path = path.string();
  // Without O_NONBLOCK a named pipe would wait for its other end.
  const int fd = open(path.c_str(), O_RDONLY | O_CLOEXEC | O_NONBLOCK);
  if (fd < 0) return FileError(path, errno);
  struct stat info = {};
  const int stat_error = fstat(fd, &info) == 0 ? 0 : errno;
  if (stat_error != 0 || !S_ISREG(info.st_mode)) {
    close(fd);
    return FileError(path, stat_error != 0 ? stat_error : S_ISDIR(info.st_mode) ? EISDIR : EINVAL);
  }
  if (info.st_size > 0) {
    const auto size = static_cast<std::size_t>(info.st_size);
    void* const data = mmap(nullptr, size, PROT_READ, MAP_PRIVATE, fd, 0);
    if (data == MAP_FAILED) {
      const int map_error = errno;
      close(fd);
      return FileError(path, map_error);
    }
    file->bytes = {static_cast<const std::byte*>(data), size};
  }
  close(fd);
  ASSIGN_OR_RETURN(file->header, ParseSafetensorsHeader(file->bytes, file->path));
  return file;
}

Checkpoint::Checkpoint() = default;
Checkpoint::~Checkpoint() = default;

absl::Status Checkpoint::Add(std::unique_ptr<File> file, std::string_view name) {
  fingerprint_ = HashOn(fingerprint_, name.data(), name.size());
  const std::uint64_t size = file->bytes.size();
  fingerprint_ = HashOn(fingerprint_, &size, sizeof(size));
  fingerprint_ = HashOn(fingerprint_, file->bytes.data(), file->header.size);
  for (const TensorEntry& entry : file->header.tensors) {
    const auto data = file->bytes.subspan(entry.begin, entry.end - entry.begin);
    fingerprint_ = HashOn(fingerprint_, data.data(), std::min(data.size(), kFingerprintBytes));
    const TensorView view{.name = entry.name,
                          .file = file->path,
                          .dtype = entry.dtype.value_or(DType::kFloat32),
                          .is_weight_dtype = entry.dtype.has_value(),
                          .dtype_name = entry.dtype_name,
                          .shape = entry.shape,
                          .data = data};
    const auto [other, is_new] = tensors_.emplace(view.name, view);
    if (!is_new) {
      return absl::InvalidArgumentError(
          fmt::format("tensor {} is in both {} and {}", view.name, other->second.file, view.file));
    }
  }
  files_.push_back(std::move(file));
  return absl::OkStatus();
}

absl::StatusOr<std::unique_ptr<Checkpoint>> Checkpoint::Open(
    const std::filesystem::path& model_dir) {
  std::error_code error;
  std::unique_ptr<Checkpoint> checkpoint(new Checkpoint());
  std::ifstream config(model_dir / "config.json", std::ios::binary);
  for (char c = 0; config.get(c);)
    checkpoint->fingerprint_ = HashOn(checkpoint->fingerprint_, &c, 1);
  if (std::filesystem::exists(model_dir / kSingleFile, error)) {
    ASSIGN_OR_RETURN(std::unique_ptr<File> file, File::Map(model_dir / kSingleFile));
    RETURN_IF_ERROR(checkpoint->Add(std::move(file), kSingleFile));
    return checkpoint;
  }
  const std::filesystem::path index_path = model_dir / kIndexFile;
  if (!std::filesystem::exists(index_path, error)) {
    return absl::NotFoundError(
        fmt::format("{}: neither {} nor {} is there", model_dir.string(), kSingleFile, kIndexFile));
  }
  ASSIGN_OR_RETURN(const WeightMap weight_map, ReadIndex(index_path));
  std::set<std::string> shards;
  for (const auto& [tensor, shard] : weight_map) shards.insert(shard);
  for (const std::string& shard : shards) {
    ASSIGN_OR_RETURN(std::unique_ptr<File> file, File::Map(model_dir / shard));
    RETURN_IF_ERROR(checkpoint->Add(std::move(file), shard));
  }
  for (const auto& [tensor, shard] : weight_map) {
    const auto found = checkpoint->tensors_.find(tensor);
    if (found == checkpoint->tensors_.end() || found->second.file != model_dir / shard) {
      return absl::InvalidArgumentError(
          fmt::format("{}: weight_map says that {} is in {}; it is in {}", index_path.string(),
                      Abbreviate(tensor), shard,
                      found == checkpoint->tensors_.end() ? "no file" : found->second.file));
    }
  }
  for (const auto& [tensor, view] : checkpoint->tensors_) {
    if (weight_map.contains(std::string(tensor))) continue;
    return absl::InvalidArgumentError(fmt::format("{}: weight_map does not name {}, which is in {}",
                                                  index_path.string(), tensor, view.file));
  }
  return checkpoint;
}

void Checkpoint::ReleasePages() const {
  for (const std::unique_ptr<File>& file : files_) {
    if (file->bytes.empty()) continue;
    madvise(const_cast<std::byte*>(file->bytes.data()), file->bytes.size(), MADV_DONTNEED);
  }
}

bool Checkpoint::Has(std::string_view name) const { return tensors_.contains(name); }

absl::StatusOr<TensorView> Checkpoint::Find(std::string_view name,
                                            absl::Span<const std::int64_t> shape) const {
  const auto found = tensors_.find(name);
  if (found == tensors_.end()) {
    return absl::NotFoundError(fmt::format("tensor {} is not in the checkpoint ({}{})", name,
                                           files_.front()->path,
                                           files_.size() > 1 ? " and the other shards" : ""));
  }
  const TensorView& tensor = found->second;
  if (!tensor.is_weight_dtype) {
    return absl::InvalidArgumentError(
        fmt::format("{}: tensor {} has dtype {}; a weight must be F32, BF16 or F16", tensor.file,
                    name, tensor.dtype_name));
  }
  if (absl::MakeConstSpan(tensor.shape) != shape) {
    return absl::InvalidArgumentError(fmt::format("{}: tensor {} has shape [{}]; expected [{}]",
                                                  tensor.file, name, fmt::join(tensor.shape, ", "),
                                                  fmt::join(shape, ", ")));
  }
  return tensor;
}

absl::StatusOr<kernels::MatrixView> Checkpoint::Rows(std::string_view name, std::int64_t rows,
                                                     std::int64_t cols, std::int64_t row_begin,
                                                     std::int64_t row_end) const {
  CHECK(0 <= row_begin && row_begin <= row_end && row_end <= rows);
  ASSIGN_OR_RETURN(const TensorView tensor, Find(name, {rows, cols}));
  return kernels::MatrixView{
      .data = tensor.data.data() + row_begin * cols * DTypeBytes(tensor.dtype),
      .dtype = tensor.dtype,
      .rows = Narrow(row_end - row_begin),
      .cols = Narrow(cols),
      .row_stride = cols};
}

absl::StatusOr<kernels::MatrixView> Checkpoint::Columns(std::string_view name, std::int64_t rows,
                                                        std::int64_t cols, std::int64_t col_begin,
                                                        std::int64_t col_end) const {
  CHECK(0 <= col_begin && col_begin <= col_end && col_end <= cols);
  ASSIGN_OR_RETURN(const TensorView tensor, Find(name, {rows, cols}));
  return kernels::MatrixView{.data = tensor.data.data() + col_begin * DTypeBytes(tensor.dtype),
                             .dtype = tensor.dtype,
                             .rows = Narrow(rows),
                             .cols = Narrow(col_end - col_begin),
                             .row_stride = cols};
}

absl::StatusOr<std::vector<float>> Checkpoint::Vector(std::string_view name, std::int64_t size,
                                                      std::int64_t begin, std::int64_t end) const {
  CHECK(0 <= begin && begin <= end && end <= size);
  ASSIGN_OR_RETURN(const TensorView tensor, Find(name, {size}));
  std::vector<float> values;
  values.reserve(static_cast<std::size_t>(end - begin));
  for (std::int64_t i = begin; i < end; ++i) {
    values.push_back(kernels::LoadElement(tensor.data.data(), i, tensor.dtype));
    if (!std::isfinite(values.back())) {
      return absl::FailedPreconditionError(
          fmt::format("{}: tensor {} is {} at index {}", tensor.file, name, values.back(), i));
    }
  }
  return values;
}

std::vector<std::string_view> Checkpoint::Names() const {
  std::vector<std::string_view> names;
  names.reserve(tensors_.size());
  for (const auto& [name, tensor] : tensors_) names.push_back(name);
  return names;
}

std::int64_t Checkpoint::total_bytes() const {
  std::int64_t bytes = 0;
  for (const auto& [name, tensor] : tensors_) {
    bytes += static_cast<std::int64_t>(tensor.data.size());
  }
  return bytes;
}

}  // namespace weft
