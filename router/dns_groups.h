#pragma once

#include <chrono>
#include <cstdint>
#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"
#include "server/ticker.h"

namespace weft {

// What is behind a name.
class NameResolver {
 public:
  virtual ~NameResolver() = default;
  // The addresses of `host`, without a port: "10.0.0.7", "fd00::7". May take its time.
  virtual absl::StatusOr<std::vector<std::string>> Resolve(const std::string& host) = 0;
};

// That of the C library: hosts file and DNS.
std::unique_ptr<NameResolver> NewSystemResolver();

// Groups by names whose addresses are those of their leaders, as a headless service has them
// ("dns:///HOST:PORT"), beside addresses that stay as they are. Asks again every `interval`, on a
// thread of its own. A name that cannot be resolved keeps the addresses that it had last.
class DnsGroups {
 public:
  static constexpr std::string_view kPrefix = "dns:///";

  // INVALID_ARGUMENT for a name that is none. `on_groups` has the first addresses before this
  // returns, and hears of every change.
  static absl::StatusOr<std::unique_ptr<DnsGroups>> Start(
      const std::vector<std::string>& groups, std::chrono::milliseconds interval,
      std::unique_ptr<NameResolver> resolver,
      std::function<void(const std::vector<std::string>&)> on_groups);

 private:
  // One entry of `groups`.
  struct Entry {
    std::string host;  // empty: `addresses` are fixed
    std::string port;
    std::vector<std::string> addresses;
    bool failed = false;  // to resolve, the last time
  };

  DnsGroups(std::vector<Entry> entries, std::unique_ptr<NameResolver> resolver,
            std::function<void(const std::vector<std::string>&)> on_groups);
  void Refresh();
  void Resolve(Entry& entry);

  std::vector<Entry> entries_;
  const std::unique_ptr<NameResolver> resolver_;
  const std::function<void(const std::vector<std::string>&)> on_groups_;
  std::optional<std::vector<std::string>> last_;
  std::optional<Ticker> ticker_;  // last: ends first
};

}  // namespace weft
