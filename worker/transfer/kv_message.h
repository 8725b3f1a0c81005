#pragma once

#include <cstddef>
#include <cstdint>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "absl/types/span.h"
#include "worker/transfer/kv_rows.h"

namespace weft {

// What ranks of two groups say to each other while they hand KV over.
enum class KvMessageType : std::uint8_t {
  kHello = 1,     // the sender's side of a connection: payload is a v1::KvEndpoint of one address
  kWelcome = 2,   // the answer: an empty payload, or why the receiver refuses
  kRows = 3,      // KV
  kTaken = 4,     // the receiver is done with one kRows; they are taken in order
  kRejected = 5,  // likewise, but it knows nothing of the transfer
  kOffer = 6,     // as kRows, to who can read it in the sender's staging: payload is a KvOffer
};

// Where a whole kRows message is in the sender's SharedMemory, until it is taken.
struct KvOffer {
  std::uint64_t offset;
  std::uint64_t bytes;
};

// All fields that a type does not name are 0.
struct KvMessage {
  KvMessageType type{};
  std::uint64_t connection = 0;  // drawn by the sender of KV; in all messages, both ways
  std::int32_t rank = 0;         // kHello: of the sender
  // kRows, kOffer, kTaken, kRejected. kHello: the descriptor of the sender's SharedMemory; 0: not
  // to be read. kWelcome: 1 if it can be.
  std::uint64_t transfer = 0;
  KvRowRange range;            // kRows, kOffer
  std::uint64_t checksum = 0;  // kRows: of the payload; 0 if it was not asked for
  absl::Span<const std::byte> payload;
};

inline constexpr std::size_t kKvHeaderBytes = 64;

// Writes the header alone: the payload follows it on the wire.
void EncodeKvHeader(const KvMessage& message, std::byte* out);  // [kKvHeaderBytes]

// INVALID_ARGUMENT, naming the field and what was seen, for what no sender writes. What a range
// means is for the receiver to check. The payload points into `bytes`.
absl::StatusOr<KvMessage> DecodeKvMessage(absl::Span<const std::byte> bytes);

// Never 0.
std::uint64_t KvChecksum(absl::Span<const std::byte> payload);

}  // namespace weft
