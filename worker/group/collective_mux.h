#pragma once

#include <cstddef>
#include <cstdint>
#include <memory>
#include <utility>
#include <vector>

#include "absl/container/flat_hash_map.h"
#include "absl/types/span.h"
#include "worker/group/communicator.h"
#include "worker/group/fabric.h"

namespace weft {

// What precedes the payload of every message between communicators.
struct CollectiveHeader {
  std::uint32_t communicator;
  std::uint32_t round;  // of the communicator, from 0; an operation has one or more rounds
  std::uint32_t operation;
  std::uint32_t reserved;
  std::uint64_t operation_bytes;  // the size the caller gave: all ranks must have given the same
  std::uint64_t offset;           // of this payload within what the sender owes the receiver
};
static_assert(sizeof(CollectiveHeader) == 32);

// A communicator cuts what it sends into pieces that the fabric carries as one frame.
inline constexpr std::int64_t kPieceBytes = kWholeMessageBytes - sizeof(CollectiveHeader);
static_assert(kPieceBytes % 32 == 0);

// Hands the messages of the kCollective channel to the communicators they are for. Messages of a
// communicator that this rank has not made yet are kept (up to a limit) until it is.
//
// Threading: the fabric's thread.
class CollectiveMux {
 public:
  class Receiver {
   public:
    virtual ~Receiver() = default;
    virtual void OnMessage(std::uint32_t from_tag, const CollectiveHeader& header,
                           absl::Span<const std::byte> payload) = 0;
    // One of the sends made with Send() ended.
    virtual void OnSent(const absl::Status& status) = 0;
  };

  explicit CollectiveMux(Fabric& fabric);
  CollectiveMux(const CollectiveMux&) = delete;
  CollectiveMux& operator=(const CollectiveMux&) = delete;

  Fabric& fabric() { return fabric_; }

  void Add(std::uint32_t id, Receiver& receiver);
  void Remove(std::uint32_t id);

  // Lets `memory` live as long as the fabric: sends that a failed communicator leaves behind may
  // still read it.
  void Keep(std::shared_ptr<const void> memory) { registry_->kept.push_back(std::move(memory)); }

  // Sends header and payload; communicator `header.communicator` is told when they may be reused.
  absl::Status Send(PeerId peer, const CollectiveHeader& header,
                    absl::Span<const std::byte> payload);

 private:
  struct Early {
    std::uint32_t from_tag;
    std::vector<std::byte> message;
  };
  // Owned by the fabric's handler, so that it may outlive the mux.
  struct Registry {
    void OnMessage(std::uint32_t from_tag, absl::Span<const std::byte> message);

    absl::flat_hash_map<std::uint32_t, Receiver*> receivers;  // null: removed
    absl::flat_hash_map<std::uint32_t, std::vector<Early>> early;
    std::size_t num_early = 0;
    std::uint64_t dropped = 0;
    std::vector<std::shared_ptr<const void>> kept;
  };

  Fabric& fabric_;
  const std::shared_ptr<Registry> registry_;
};

}  // namespace weft
