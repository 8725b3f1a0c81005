#include "client/prompts_file.h"

#include <cerrno>
#include <charconv>
#include <cstdint>
#include <cstring>
#include <filesystem>
#include <fstream>
#include <iterator>
#include <string>
#include <system_error>

#include "client/sampling_json.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/base/parse_json.h"
#include "server/base/status_macros.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;

// It is read whole.
constexpr std::uintmax_t kMaxFileBytes = std::uintmax_t{1} << 30;

absl::Status ReadField(const std::string& key, const Json& value, v1::GenerateRequest& request) {
  if (key == "prompt") {
    if (!value.is_string()) return WrongJsonType(key, "a string", value);
    request.set_text(value.get_ref<const std::string&>());
    return absl::OkStatus();
  }
  if (key == "prompt_token_ids") {
    ASSIGN_OR_RETURN(const std::vector<std::int32_t> ids, TokenIdsFromJson(key, value));
    request.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
    return absl::OkStatus();
  }
  if (key == "cache_salt") {
    if (!value.is_string()) return WrongJsonType(key, "a string", value);
    request.set_cache_salt(value.get_ref<const std::string&>());
    return absl::OkStatus();
  }
  const absl::Status status = SetSamplingField(key, value, *request.mutable_sampling());
  if (!absl::IsNotFound(status)) return status;
  return absl::InvalidArgumentError(
      fmt::format("`{}` is unknown; prompt, prompt_token_ids, cache_salt, {} are known", key,
                  SamplingFieldNames()));
}

absl::StatusOr<v1::GenerateRequest> ParseLine(std::string_view line,
                                              const v1::SamplingParams& defaults) {
  ASSIGN_OR_RETURN(const Json object, ParseJson(line));
  if (!object.is_object()) return absl::InvalidArgumentError("not a JSON object");
  const auto given = [&](const char* key) {
    const auto it = object.find(key);
    return it != object.end() && !it->is_null();
  };
  if (given("prompt") == given("prompt_token_ids")) {
    return absl::InvalidArgumentError("exactly one of `prompt` and `prompt_token_ids` is wanted");
  }
  v1::GenerateRequest request;
  *request.mutable_sampling() = defaults;
  for (const auto& [key, value] : object.items()) {
    if (!value.is_null()) RETURN_IF_ERROR(ReadField(key, value, request));
  }
  if (request.sampling().n() > 1) {
    return absl::InvalidArgumentError(fmt::format(
        "`n` is {}; one completion per line is printed: 1 is allowed", request.sampling().n()));
  }
  return request;
}

}  // namespace

absl::StatusOr<std::vector<v1::GenerateRequest>> ParsePromptsFile(
    std::string_view contents, std::string_view file_name, const v1::SamplingParams& defaults) {
  std::vector<v1::GenerateRequest> requests;
  for (int number = 1; !contents.empty(); ++number) {
    const std::size_t end = contents.find('\n');
    const std::string_view line = contents.substr(0, end);
    contents.remove_prefix(end == std::string_view::npos ? contents.size() : end + 1);
    if (line.find_first_not_of(" \t\r") == std::string_view::npos) continue;
    absl::StatusOr<v1::GenerateRequest> request = ParseLine(line, defaults);
    if (!request.ok()) {
      return absl::InvalidArgumentError(
          fmt::format("{}:{}: {}", file_name, number, std::string(request.status().message())));
    }
    requests.push_back(*std::move(request));
  }
  return requests;
}

absl::StatusOr<std::vector<v1::GenerateRequest>> ReadPromptsFile(
    const std::string& file_name, const v1::SamplingParams& defaults) {
  std::error_code ignored;
  if (std::filesystem::is_directory(file_name, ignored)) {
    return absl::InvalidArgumentError(
        fmt::format("{}: is a directory; a file with a JSON object per line is wanted", file_name));
  }
  // A pipe or device has no size.
  std::error_code no_size;
  const std::uintmax_t num_bytes = std::filesystem::file_size(file_name, no_size);
  if (!no_size && num_bytes > kMaxFileBytes) {
    return absl::InvalidArgumentError(fmt::format("{}: has {} bytes; at most {} are allowed",
                                                  file_name, num_bytes, kMaxFileBytes));
  }
  std::ifstream file(file_name, std::ios::binary);
  if (!file) {
    return absl::NotFoundError(
        fmt::format("{}: cannot be read: {}", file_name, std::strerror(errno)));
  }
  const std::string contents(std::istreambuf_iterator<char>(file), {});
  ASSIGN_OR_RETURN(std::vector<v1::GenerateRequest> requests,
                   ParsePromptsFile(contents, file_name, defaults));
  if (requests.empty()) {
    return absl::InvalidArgumentError(fmt::format("{}: no prompt in it", file_name));
  }
  return requests;
}

absl::StatusOr<std::vector<std::int32_t>> ParseTokenIds(std::string_view list) {
  std::vector<std::int32_t> ids;
  while (true) {
    const std::size_t comma = list.find(',');
    std::string_view item = list.substr(0, comma);
    while (!item.empty() && item.front() == ' ') item.remove_prefix(1);
    while (!item.empty() && item.back() == ' ') item.remove_suffix(1);
    std::int32_t id = 0;
    const auto [end, error] = std::from_chars(item.data(), item.data() + item.size(), id);
    if (error != std::errc() || end != item.data() + item.size()) {
      return absl::InvalidArgumentError(
          fmt::format("\"{}\" is not a token id; a list like 1,2,3 is wanted", item));
    }
    ids.push_back(id);
    if (comma == std::string_view::npos) return ids;
    list.remove_prefix(comma + 1);
  }
}

}  // namespace weft
