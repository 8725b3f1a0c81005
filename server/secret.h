#pragma once

#include <array>
#include <optional>
#include <string>
#include <string_view>

#include "absl/status/statusor.h"

// Forward: grpcpp headers are slow to compile.
namespace grpc {
class CallbackServerContext;
}  // namespace grpc

namespace weft {

// What is kept of a secret in order to know it again.
class SecretDigest {
 public:
  explicit SecretDigest(std::string_view secret);

  // Takes equally long whatever the two have in common.
  bool Equals(const SecretDigest& other) const;

 private:
  std::array<unsigned char, 32> sha256_;
};

// What may be one: 1 to 4096 visible ASCII characters, so that it can go into a header.
bool IsSecret(std::string_view text);

// The secret in a file, without white space at its end. INVALID_ARGUMENT names flag and path, never
// what is in the file.
absl::StatusOr<std::string> ReadSecretFile(std::string_view flag, const std::string& path);

// TOKEN of "authorization: Bearer TOKEN" in a call's metadata; nothing without. Valid as long as
// `context`.
std::optional<std::string_view> BearerToken(const grpc::CallbackServerContext& context);

}  // namespace weft
