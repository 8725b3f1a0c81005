#include "worker/group/collective_mux.h"

#include <bit>
#include <cstring>
#include <utility>

#include "server/base/check.h"
#include "server/base/log.h"

namespace weft {
namespace {

constexpr std::size_t kMaxEarlyMessages = 256;

}  // namespace

CollectiveMux::CollectiveMux(Fabric& fabric)
    : fabric_(fabric), registry_(std::make_shared<Registry>()) {
  fabric.Receive(Channel::kCollective, [registry = registry_](std::uint32_t from_tag,
                                                              absl::Span<const std::byte> message) {
    registry->OnMessage(from_tag, message);
  });
}

void CollectiveMux::Registry::OnMessage(std::uint32_t from_tag,
                                        absl::Span<const std::byte> message) {
  CollectiveHeader header;
  if (message.size() >= sizeof(header)) {
    std::memcpy(&header, message.data(), sizeof(header));
    auto found = receivers.find(header.communicator);
    if (found != receivers.end() && found->second != nullptr) {
      found->second->OnMessage(from_tag, header, message.subspan(sizeof(header)));
      return;
    }
    if (found == receivers.end() && num_early < kMaxEarlyMessages) {
      ++num_early;
      early[header.communicator].push_back({from_tag, {message.begin(), message.end()}});
      return;
    }
  }
  if (std::has_single_bit(++dropped)) {
    spdlog::warn(
        "collectives: dropped a message of {} bytes from rank {} that no communicator wants; {} so "
        "far",
        message.size(), from_tag, dropped);
  }
}

void CollectiveMux::Add(std::uint32_t id, Receiver& receiver) {
  CHECK_MSG(registry_->receivers.emplace(id, &receiver).second,
            "a communicator id is used once in the life of a fabric");
  auto early = registry_->early.find(id);
  if (early == registry_->early.end()) return;
  const std::vector<Early> messages = std::move(early->second);
  registry_->early.erase(early);
  registry_->num_early -= messages.size();
  for (const Early& m : messages) registry_->OnMessage(m.from_tag, m.message);
}

void CollectiveMux::Remove(std::uint32_t id) { registry_->receivers[id] = nullptr; }

absl::Status CollectiveMux::Send(PeerId peer, const CollectiveHeader& header,
                                 absl::Span<const std::byte> payload) {
  const absl::Span<const std::byte> spans[] = {
      absl::MakeConstSpan(reinterpret_cast<const std::byte*>(&header), sizeof(header)), payload};
  // Small enough for std::function to hold without allocating. The fabric owns the registry.
  struct Done {
    Registry* registry;
    std::uint64_t id;
    void operator()(const absl::Status& status) const {
      auto found = registry->receivers.find(static_cast<std::uint32_t>(id));
      if (found != registry->receivers.end() && found->second != nullptr) {
        found->second->OnSent(status);
      }
    }
  };
  return fabric_.Send(peer, Channel::kCollective, spans,
                      Done{registry_.get(), header.communicator});
}

std::shared_ptr<CollectiveMux> MakeCollectiveMux(Fabric& fabric) {
  return std::make_shared<CollectiveMux>(fabric);
}

}  // namespace weft
