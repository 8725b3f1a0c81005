#include "server/base/read_file.h"

#include <fmt/format.h>

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

}  // namespace weft
