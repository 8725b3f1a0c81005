#pragma once

#include <cstddef>
#include <cstdint>
#include <map>
#include <memory>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "worker/group/fabric.h"

namespace weft {

// What precedes the payload of every frame on the wire. Little-endian, as every host we run on.
struct FrameHeader {
  std::uint32_t magic;       // kFrameMagic: also the wire version
  std::uint32_t from_tag;    // the sender's self_tag
  std::uint64_t connection;  // drawn by the sender, one per Connect()
  std::uint32_t sequence;    // of the frame within the connection, from 0
  std::uint8_t channel;
  std::uint8_t reserved[3];
  std::uint64_t message_bytes;  // of the whole message; the frames of a message follow each other
  std::uint64_t key;  // the receiver's, from its address: who was not given that cannot be heard
};
static_assert(sizeof(FrameHeader) == 40 && sizeof(FrameHeader) % 8 == 0,
              "payload behind the header keeps the alignment of the frame");

inline constexpr std::uint32_t kFrameMagic = 0x32544657;  // "WFT2"
inline constexpr std::size_t kFrameBytes = sizeof(FrameHeader) + kWholeMessageBytes;
// Between groups: over TCP a frame costs about 20 us, however long it is.
inline constexpr std::int64_t kLongFramePayloadBytes = 64000;

// Turns frames from the wire back into messages, in the order of each sender, whatever the order
// frames arrive in, and trusts nothing in them: a frame that makes no sense is counted and dropped.
//
// Threading: one thread.
class FrameAssembler {
 public:
  // Receives whole messages, 8-byte aligned and valid during the call only.
  class Sink {
   public:
    virtual ~Sink() = default;
    // `header` is that of the message's last frame; its channel is a valid one.
    virtual void OnMessage(const FrameHeader& header, absl::Span<const std::byte> payload) = 0;
  };

  // Frames without `key` are dropped; others have at most `max_payload_bytes` behind the header.
  explicit FrameAssembler(Sink& sink, std::uint64_t key = 0,
                          std::int64_t max_payload_bytes = kWholeMessageBytes)
      : sink_(sink),
        key_(key),
        max_payload_bytes_(max_payload_bytes),
        scratch_((max_payload_bytes + 7) / 8) {}

  // `frame` is valid during the call only and may have any alignment.
  void Accept(absl::Span<const std::byte> frame);

  std::uint64_t bad_frames() const { return bad_frames_; }
  std::uint64_t early_frames() const { return early_frames_; }

 private:
  using Words = std::unique_ptr<std::uint64_t[]>;

  struct Connection {
    std::uint32_t next_sequence = 0;
    std::uint64_t last_used = 0;
    // The message being put together; `buffer` is kept for the next one.
    Words buffer;
    std::uint64_t capacity = 0;
    std::uint64_t filled = 0;
    std::uint64_t message_bytes = 0;
    std::uint8_t channel = 0;
    // Frames that overtook others, by sequence number.
    std::map<std::uint32_t, std::vector<std::byte>> early;
  };

  void Bad(const char* what);
  Connection& Find(std::uint64_t id);
  void Apply(Connection& connection, absl::Span<const std::byte> frame);
  void Append(Connection& connection, const FrameHeader& header,
              absl::Span<const std::byte> payload);
  void Deliver(const FrameHeader& header, absl::Span<const std::byte> payload);

  Sink& sink_;
  const std::uint64_t key_;
  const std::int64_t max_payload_bytes_;
  absl::flat_hash_map<std::uint64_t, std::unique_ptr<Connection>> connections_;
  std::uint64_t clock_ = 0;
  std::uint64_t bad_frames_ = 0;
  std::uint64_t early_frames_ = 0;
  std::vector<std::uint64_t> scratch_;
};

}  // namespace weft
