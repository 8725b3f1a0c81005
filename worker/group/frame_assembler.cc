#include "worker/group/frame_assembler.h"

#include <algorithm>
#include <bit>
#include <cstring>
#include <utility>

#include "server/base/log.h"

namespace weft {
namespace {

// Limits on what strangers can make us hold. A replica has tens of peers.
constexpr std::size_t kMaxConnections = 1024;
constexpr std::size_t kMaxEarlyFrames = 4096;
// Larger reassembly buffers are given back after use.
constexpr std::uint64_t kKeptBufferBytes = std::uint64_t{4} << 20;

}  // namespace

void FrameAssembler::Bad(const char* what) {
  ++bad_frames_;
  // The 1st, 2nd, 4th, 8th ... so that a stream of garbage does not become a stream of log lines.
  if (std::has_single_bit(bad_frames_)) {
    spdlog::warn("fabric: dropped a frame ({}); {} dropped so far", what, bad_frames_);
  }
}

FrameAssembler::Connection& FrameAssembler::Find(std::uint64_t id) {
  std::unique_ptr<Connection>& slot = connections_[id];
  if (slot == nullptr) {
    slot = std::make_unique<Connection>();
    slot->last_used = ++clock_;
    if (connections_.size() > kMaxConnections) {
      auto oldest = std::min_element(
          connections_.begin(), connections_.end(),
          [](const auto& a, const auto& b) { return a.second->last_used < b.second->last_used; });
      connections_.erase(oldest);
      return *connections_.find(id)->second;
    }
  }
  slot->last_used = ++clock_;
  return *slot;
}

void FrameAssembler::Accept(absl::Span<const std::byte> frame) {
  FrameHeader header;
  if (frame.size() < sizeof(header)) return Bad("shorter than a header");
  std::memcpy(&header, frame.data(), sizeof(header));
  if (header.magic != kFrameMagic) return Bad("wrong magic or wire version");
  if (header.key != key_) return Bad("from somebody who was not given our address");
  if (static_cast<std::int64_t>(frame.size() - sizeof(header)) > max_payload_bytes_) {
    return Bad("longer than a frame");
  }
  if (header.channel >= kNumChannels) return Bad("unknown channel");
  if (header.message_bytes > static_cast<std::uint64_t>(kMaxMessageBytes)) {
    return Bad("message longer than the limit");
  }

  Connection& connection = Find(header.connection);
  const std::uint32_t ahead = header.sequence - connection.next_sequence;
  if (ahead != 0) {
    if (ahead > kMaxEarlyFrames) return Bad("sequence number out of range");
    ++early_frames_;
    connection.early.try_emplace(header.sequence, frame.begin(), frame.end());
    return;
  }
  Apply(connection, frame);
  while (!connection.early.empty()) {
    auto next = connection.early.find(connection.next_sequence);
    if (next == connection.early.end()) break;
    const std::vector<std::byte> held = std::move(next->second);
    connection.early.erase(next);
    Apply(connection, held);
  }
}

void FrameAssembler::Apply(Connection& connection, absl::Span<const std::byte> frame) {
  FrameHeader header;
  std::memcpy(&header, frame.data(), sizeof(header));
  ++connection.next_sequence;
  const absl::Span<const std::byte> payload = frame.subspan(sizeof(header));
  if (connection.message_bytes == 0 && payload.size() == header.message_bytes) {
    return Deliver(header, payload);
  }
  Append(connection, header, payload);
}

void FrameAssembler::Append(Connection& connection, const FrameHeader& header,
                            absl::Span<const std::byte> payload) {
  if (connection.message_bytes == 0) {
    if (header.message_bytes <= static_cast<std::uint64_t>(max_payload_bytes_)) {
      return Bad("length does not match the message");
    }
    connection.message_bytes = header.message_bytes;
    connection.channel = header.channel;
    connection.filled = 0;
    if (connection.capacity < header.message_bytes) {
      // Not initialised: a length that lies costs address space, not memory.
      connection.buffer =
          std::make_unique_for_overwrite<std::uint64_t[]>((header.message_bytes + 7) / 8);
      connection.capacity = header.message_bytes;
    }
  }
  if (header.message_bytes != connection.message_bytes || header.channel != connection.channel ||
      payload.empty() || payload.size() > connection.message_bytes - connection.filled) {
    connection.message_bytes = 0;
    return Bad("does not continue its message");
  }
  std::byte* const bytes = reinterpret_cast<std::byte*>(connection.buffer.get());
  std::memcpy(bytes + connection.filled, payload.data(), payload.size());
  connection.filled += payload.size();
  if (connection.filled < connection.message_bytes) return;
  connection.message_bytes = 0;
  Deliver(header, absl::MakeConstSpan(bytes, connection.filled));
  if (connection.capacity > kKeptBufferBytes) {
    connection.buffer.reset();
    connection.capacity = 0;
  }
}

void FrameAssembler::Deliver(const FrameHeader& header, absl::Span<const std::byte> payload) {
  if (reinterpret_cast<std::uintptr_t>(payload.data()) % 8 != 0) {
    // Only whole messages get here unaligned, and those fit.
    auto* const scratch = reinterpret_cast<std::byte*>(scratch_.data());
    std::memcpy(scratch, payload.data(), payload.size());
    payload = absl::MakeConstSpan(scratch, payload.size());
  }
  sink_.OnMessage(header, payload);
}

}  // namespace weft
