#include "server/block_hash.h"

#include <bit>
#include <initializer_list>
#include <memory>

#include "fmt/format.h"
#include "openssl/evp.h"
#include "server/base/check.h"

namespace weft {
namespace {

static_assert(std::endian::native == std::endian::little,
              "tokens are hashed as they lie in memory");

struct FreeContext {
  void operator()(EVP_MD_CTX* context) const { EVP_MD_CTX_free(context); }
};

BlockHash Sha256(std::initializer_list<absl::Span<const std::uint8_t>> parts) {
  // Looked up once; a context that is used again allocates nothing.
  static EVP_MD* const sha256 = EVP_MD_fetch(nullptr, "SHA256", nullptr);
  thread_local const std::unique_ptr<EVP_MD_CTX, FreeContext> context(EVP_MD_CTX_new());
  CHECK_MSG(sha256 != nullptr && EVP_DigestInit_ex2(context.get(), sha256, nullptr) == 1,
            "OpenSSL has no SHA-256");
  for (const absl::Span<const std::uint8_t> part : parts) {
    CHECK(EVP_DigestUpdate(context.get(), part.data(), part.size()) == 1);
  }
  BlockHash hash;
  CHECK(EVP_DigestFinal_ex(context.get(), hash.data(), nullptr) == 1);
  return hash;
}

absl::Span<const std::uint8_t> Bytes(std::string_view text) {
  return {reinterpret_cast<const std::uint8_t*>(text.data()), text.size()};
}

}  // namespace

std::string BlockHashKey(std::uint64_t fingerprint, std::int32_t block_size) {
  return fmt::format("weft blocks 1, checkpoint {:016x}, block_size {}", fingerprint, block_size);
}

std::vector<BlockHash> StartHashChain(std::string_view key, std::string_view cache_salt) {
  // The length keeps the key's end apart from the salt's beginning.
  return {Sha256({Bytes(fmt::format("{}:", key.size())), Bytes(key), Bytes(cache_salt)})};
}

void ExtendHashChain(absl::Span<const std::int32_t> token_ids, std::int32_t block_size,
                     std::vector<BlockHash>& chain) {
  const std::size_t num_blocks = token_ids.size() / block_size;
  while (chain.size() <= num_blocks) {
    const auto tokens = token_ids.subspan((chain.size() - 1) * block_size, block_size);
    chain.push_back(Sha256({chain.back(),
                            {reinterpret_cast<const std::uint8_t*>(tokens.data()),
                             tokens.size() * sizeof(std::int32_t)}}));
  }
}

}  // namespace weft
