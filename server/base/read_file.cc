#include "server/base/read_file.h"

#include <fmt/format.h>
#include <sys/stat.h>

#include <filesystem>
#include <fstream>
#include <iterator>
#include <system_error>

#include "absl/status/status.h"

namespace weft {

absl::StatusOr<std::string> ReadFile(const std::string& path, std::uintmax_t max_bytes) {
  std::error_code error;
  const std::uintmax_t num_bytes = std::filesystem::file_size(path, error);
  if (error) return absl::NotFoundError(fmt::format("{}: {}", path, error.message()));
  if (num_bytes > max_bytes) {
    return absl::InvalidArgumentError(
        fmt::format("{} has {} bytes; at most {} are read", path, num_bytes, max_bytes));
  }
  std::ifstream file(path, std::ios::binary);
  std::string text{std::istreambuf_iterator<char>(file), std::istreambuf_iterator<char>()};
  if (!file) return absl::NotFoundError(fmt::format("{} cannot be read", path));
  return text;
}

FileStamp StampFile(const std::string& path) {
  struct stat found = {};
  if (stat(path.c_str(), &found) != 0) return {};
  return {static_cast<std::int64_t>(found.st_ino), found.st_size, found.st_mtim.tv_sec,
          found.st_mtim.tv_nsec};
}

}  // namespace weft
