#pragma once

#include <algorithm>
#include <cstdint>
#include <map>
#include <optional>
#include <string>
#include <tuple>
#include <utility>

namespace weft {

// What waits, by priority, then fairly between tenants, then by arrival.
//
// Fair is start-time fair queueing: every item costs something, and among equal priorities those of
// a tenant stand one behind the other on a scale of cost, beside the others'. So tenants are served
// at equal cost while they wait, whatever they send, and one that comes late is not behind what
// others have piled up.
//
// Not thread-safe.
template <typename T>
class FairQueue {
 public:
  std::size_t size() const { return items_.size(); }
  bool empty() const { return items_.empty(); }

  // Lower priorities come sooner.
  void Push(std::int32_t priority, const std::string& tenant, double cost, T item) {
    Level& level = levels_[priority];
    double& charged = level.charged[tenant];
    const double start = std::max(level.now, charged);
    charged = start + cost;
    ++level.size;
    items_.emplace(Key(priority, start, next_++), Item{std::move(item), tenant, cost});
  }

  // How many would stand before an item that was pushed now.
  std::int64_t CountBefore(std::int32_t priority, const std::string& tenant) const {
    return std::distance(items_.begin(), items_.upper_bound(KeyOf(priority, tenant)));
  }

  // The last item that `may_go`, if one that was pushed now would stand before it; it is removed.
  template <typename MayGo>
  std::optional<T> PopLastFor(std::int32_t priority, const std::string& tenant, MayGo may_go) {
    const Key key = KeyOf(priority, tenant);
    for (auto it = items_.rbegin(); it != items_.rend() && key < it->first; ++it) {
      if (!may_go(it->second.value)) continue;
      T item = std::move(it->second.value);
      Remove(std::prev(it.base()));
      return item;
    }
    return std::nullopt;
  }

  // Looks at the items in order: kServed and kRemove take one out, kStop ends it.
  enum class Verdict { kKeep, kServed, kRemove, kStop };
  template <typename Look>
  void Scan(Look look) {
    for (auto it = items_.begin(); it != items_.end();) {
      switch (look(it->second.value)) {
        case Verdict::kStop:
          return;
        case Verdict::kKeep:
          ++it;
          break;
        case Verdict::kServed: {
          Level& level = levels_[std::get<0>(it->first)];
          level.now = std::max(level.now, std::get<1>(it->first));
          it = Erase(it);
          break;
        }
        case Verdict::kRemove:
          it = Remove(it);
          break;
      }
    }
  }

 private:
  using Key = std::tuple<std::int32_t, double, std::uint64_t>;  // priority, start, arrival
  struct Item {
    T value;
    std::string tenant;
    double cost;
  };
  using Items = std::map<Key, Item>;
  // Items of one priority.
  struct Level {
    double now = 0;                         // where service has come to on the scale
    std::map<std::string, double> charged;  // up to where on it a tenant has had or waits for
    std::size_t size = 0;
  };

  Key KeyOf(std::int32_t priority, const std::string& tenant) const {
    double start = 0;
    if (const auto level = levels_.find(priority); level != levels_.end()) {
      const auto charged = level->second.charged.find(tenant);
      start = level->second.now;
      if (charged != level->second.charged.end()) start = std::max(start, charged->second);
    }
    return {priority, start, next_};
  }

  // Unserved: the newest of a tenant costs it nothing then.
  typename Items::iterator Remove(typename Items::iterator it) {
    const auto& [priority, start, arrival] = it->first;
    double& charged = levels_[priority].charged[it->second.tenant];
    if (charged == start + it->second.cost) charged = start;
    return Erase(it);
  }

  typename Items::iterator Erase(typename Items::iterator it) {
    const auto level = levels_.find(std::get<0>(it->first));
    if (--level->second.size == 0) levels_.erase(level);
    return items_.erase(it);
  }

  Items items_;
  std::map<std::int32_t, Level> levels_;
  std::uint64_t next_ = 0;
};

}  // namespace weft
