#include "server/secret.h"

#include <openssl/crypto.h>
#include <openssl/sha.h>
#include <strings.h>

#include <algorithm>
#include <cstdint>

#include "fmt/format.h"
#include "grpcpp/server_context.h"
#include "server/base/read_file.h"

namespace weft {
namespace {

constexpr std::size_t kMaxSecretBytes = 4096;
constexpr std::uintmax_t kMaxFileBytes = 16384;

}  // namespace

SecretDigest::SecretDigest(std::string_view secret) {
  SHA256(reinterpret_cast<const unsigned char*>(secret.data()), secret.size(), sha256_.data());
}

bool SecretDigest::Equals(const SecretDigest& other) const {
  return CRYPTO_memcmp(sha256_.data(), other.sha256_.data(), sha256_.size()) == 0;
}

bool IsSecret(std::string_view text) {
  return !text.empty() && text.size() <= kMaxSecretBytes &&
         std::all_of(text.begin(), text.end(), [](char c) { return c > ' ' && c <= '~'; });
}

absl::StatusOr<std::string> ReadSecretFile(std::string_view flag, const std::string& path) {
  absl::StatusOr<std::string> text = ReadFile(path, kMaxFileBytes);
  if (!text.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {}", flag, std::string(text.status().message())));
  }
  text->erase(text->find_last_not_of(" \t\r\n") + 1);
  if (IsSecret(*text)) return text;
  return absl::InvalidArgumentError(
      fmt::format("{}: {} does not hold one secret of 1 to {} visible ASCII characters", flag, path,
                  kMaxSecretBytes));
}

std::optional<std::string_view> BearerToken(const grpc::CallbackServerContext& context) {
  constexpr std::string_view kScheme = "Bearer ";
  const auto found = context.client_metadata().find("authorization");
  if (found == context.client_metadata().end()) return std::nullopt;
  const std::string_view value(found->second.data(), found->second.size());
  if (value.size() < kScheme.size() ||
      strncasecmp(value.data(), kScheme.data(), kScheme.size()) != 0) {
    return std::nullopt;
  }
  return value.substr(kScheme.size());
}

}  // namespace weft
