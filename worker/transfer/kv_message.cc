#include "worker/transfer/kv_message.h"

#include <cstring>

#include "fmt/format.h"

namespace weft {
namespace {

struct Header {
  std::uint32_t magic;
  std::uint8_t version;
  std::uint8_t type;
  std::uint16_t layer;
  std::uint64_t connection;
  std::uint64_t transfer;
  std::int64_t first_position;
  std::int64_t end_position;
  std::uint64_t checksum;
  std::int32_t rank;
  std::int32_t first_head;
  std::int32_t num_heads;
  std::uint32_t payload_bytes;
};
static_assert(sizeof(Header) == kKvHeaderBytes);

constexpr std::uint32_t kMagic = 0x564b4657;  // "WFKV"
constexpr std::uint8_t kVersion = 1;

}  // namespace

void EncodeKvHeader(const KvMessage& message, std::byte* out) {
  const Header header = {.magic = kMagic,
                         .version = kVersion,
                         .type = static_cast<std::uint8_t>(message.type),
                         .layer = static_cast<std::uint16_t>(message.range.layer),
                         .connection = message.connection,
                         .transfer = message.transfer,
                         .first_position = message.range.first_position,
                         .end_position = message.range.end_position,
                         .checksum = message.checksum,
                         .rank = message.rank,
                         .first_head = message.range.heads.begin,
                         .num_heads = message.range.heads.size(),
                         .payload_bytes = static_cast<std::uint32_t>(message.payload.size())};
  std::memcpy(out, &header, sizeof(header));
}

absl::StatusOr<KvMessage> DecodeKvMessage(absl::Span<const std::byte> bytes) {
  Header header;
  if (bytes.size() < sizeof(header)) {
    return absl::InvalidArgumentError(
        fmt::format("KV message: {} bytes; the header alone has {}", bytes.size(), sizeof(header)));
  }
  std::memcpy(&header, bytes.data(), sizeof(header));
  const absl::Span<const std::byte> payload = bytes.subspan(sizeof(header));
  if (header.magic != kMagic || header.version != kVersion) {
    return absl::InvalidArgumentError(
        fmt::format("KV message: magic {:#x}, version {}; this build speaks {:#x}, {}",
                    header.magic, header.version, kMagic, kVersion));
  }
  if (header.type < static_cast<std::uint8_t>(KvMessageType::kHello) ||
      header.type > static_cast<std::uint8_t>(KvMessageType::kOffer)) {
    return absl::InvalidArgumentError(
        fmt::format("KV message: type is {}; allowed is 1 to 6", header.type));
  }
  if (header.payload_bytes != payload.size()) {
    return absl::InvalidArgumentError(fmt::format("KV message: {} bytes of payload; it says {}",
                                                  payload.size(), header.payload_bytes));
  }
  if (header.first_position < 0 || header.end_position < header.first_position) {
    return absl::InvalidArgumentError(
        fmt::format("KV message: positions {} to {}", header.first_position, header.end_position));
  }
  constexpr std::int32_t kMaxHeads = 1 << 20;
  if (header.first_head < 0 || header.first_head > kMaxHeads || header.num_heads < 0 ||
      header.num_heads > kMaxHeads) {
    return absl::InvalidArgumentError(
        fmt::format("KV message: {} heads from {}; allowed is 0 to {}", header.num_heads,
                    header.first_head, kMaxHeads));
  }
  return KvMessage{.type = static_cast<KvMessageType>(header.type),
                   .connection = header.connection,
                   .rank = header.rank,
                   .transfer = header.transfer,
                   .range = {.layer = header.layer,
                             .heads = {header.first_head, header.first_head + header.num_heads},
                             .first_position = header.first_position,
                             .end_position = header.end_position},
                   .checksum = header.checksum,
                   .payload = payload};
}

std::uint64_t KvChecksum(absl::Span<const std::byte> payload) {  // FNV-1a over words
  std::uint64_t hash = 0xcbf29ce484222325;
  std::size_t at = 0;
  for (; at + 8 <= payload.size(); at += 8) {
    std::uint64_t word = 0;
    std::memcpy(&word, payload.data() + at, 8);
    hash = (hash ^ word) * 0x100000001b3;
    hash ^= hash >> 29;
  }
  for (; at < payload.size(); ++at) {
    hash = (hash ^ std::to_integer<std::uint64_t>(payload[at])) * 0x100000001b3;
  }
  return hash == 0 ? 1 : hash;
}

}  // namespace weft
