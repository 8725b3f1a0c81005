#include "router/dns_groups.h"

#include <netdb.h>
#include <sys/socket.h>

#include <algorithm>
#include <utility>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "server/base/log.h"
#include "server/base/quoted.h"
#include "server/grpc_address.h"

namespace weft {
namespace {

class SystemResolver final : public NameResolver {
 public:
  absl::StatusOr<std::vector<std::string>> Resolve(const std::string& host) override {
    addrinfo hints = {};
    hints.ai_socktype = SOCK_STREAM;
    addrinfo* found = nullptr;
    if (const int error = getaddrinfo(host.c_str(), nullptr, &hints, &found); error != 0) {
      return absl::UnavailableError(gai_strerror(error));
    }
    std::vector<std::string> addresses;
    for (const addrinfo* at = found; at != nullptr; at = at->ai_next) {
      char text[NI_MAXHOST];
      if (getnameinfo(at->ai_addr, at->ai_addrlen, text, sizeof(text), nullptr, 0,
                      NI_NUMERICHOST) == 0) {
        addresses.emplace_back(text);
      }
    }
    freeaddrinfo(found);
    return addresses;
  }
};

std::string WithPort(const std::string& address, const std::string& port) {
  return address.find(':') == std::string::npos ? fmt::format("{}:{}", address, port)
                                                : fmt::format("[{}]:{}", address, port);
}

}  // namespace

std::unique_ptr<NameResolver> NewSystemResolver() { return std::make_unique<SystemResolver>(); }

absl::StatusOr<std::unique_ptr<DnsGroups>> DnsGroups::Start(
    const std::vector<std::string>& groups, std::chrono::milliseconds interval,
    std::unique_ptr<NameResolver> resolver,
    std::function<void(const std::vector<std::string>&)> on_groups) {
  std::vector<Entry> entries;
  for (const std::string& group : groups) {
    const bool name = group.starts_with(kPrefix);
    const std::string target = name ? group.substr(kPrefix.size()) : group;
    const absl::Status valid = CheckGrpcAddress(target, 1);
    if (!valid.ok() || (name && target.starts_with(kUnixAbstract))) {
      return absl::InvalidArgumentError(
          fmt::format("--groups: {} is neither HOST:PORT with a port of 1 to 65535, nor {}NAME, "
                      "nor {}HOST:PORT",
                      Quoted(group), kUnixAbstract, kPrefix));
    }
    if (!name) {
      entries.push_back({.addresses = {group}});
      continue;
    }
    const std::size_t colon = target.rfind(':');
    entries.push_back({.host = target.substr(0, colon), .port = target.substr(colon + 1)});
  }
  std::unique_ptr<DnsGroups> started(
      new DnsGroups(std::move(entries), std::move(resolver), std::move(on_groups)));
  started->Refresh();
  const bool any_name = std::any_of(started->entries_.begin(), started->entries_.end(),
                                    [](const Entry& entry) { return !entry.host.empty(); });
  if (any_name) {
    started->ticker_.emplace(interval, [dns = started.get()] { dns->Refresh(); });
  }
  return started;
}

DnsGroups::DnsGroups(std::vector<Entry> entries, std::unique_ptr<NameResolver> resolver,
                     std::function<void(const std::vector<std::string>&)> on_groups)
    : entries_(std::move(entries)),
      resolver_(std::move(resolver)),
      on_groups_(std::move(on_groups)) {}

void DnsGroups::Refresh() {
  std::vector<std::string> all;
  for (Entry& entry : entries_) {
    if (!entry.host.empty()) Resolve(entry);
    for (const std::string& address : entry.addresses) {
      if (std::find(all.begin(), all.end(), address) == all.end()) all.push_back(address);
    }
  }
  if (last_ == all) return;
  if (last_) spdlog::info("groups are now at {}", fmt::join(all, ", "));
  last_ = all;
  on_groups_(all);
}

void DnsGroups::Resolve(Entry& entry) {
  const absl::StatusOr<std::vector<std::string>> found = resolver_->Resolve(entry.host);
  const bool failed = !found.ok() || found->empty();
  if (failed && !entry.failed) {
    spdlog::warn("{}: {}; its groups stay as they are", entry.host,
                 found.ok() ? "no address" : std::string(found.status().message()));
  }
  entry.failed = failed;
  if (failed) return;
  entry.addresses.clear();
  for (const std::string& address : *found) {
    entry.addresses.push_back(WithPort(address, entry.port));
  }
  std::sort(entry.addresses.begin(), entry.addresses.end());  // answers come in any order
}

}  // namespace weft
