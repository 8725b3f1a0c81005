#pragma once

#include <cstdint>
#include <optional>
#include <string>
#include <vector>

#include "absl/status/status.h"
#include "absl/status/statusor.h"
#include "absl/time/time.h"
#include "server/base/mutex.h"

namespace weft {

// What a rank brings when it joins its group.
struct RankOffer {
  std::int32_t rank = 0;
  std::string fabric_address;
  std::int32_t num_blocks = 0;    // that its memory allows
  std::string kv_fabric_address;  // empty: exchanges no KV with other groups
  std::string agreed;             // RankModel::Agreement(): must equal the leader's
};

// The leader's list of who has joined. A place is taken once: a second join of a rank, or the end
// of a joined rank's stream, ends the group.
//
// Thread-safe.
class JoinTable {
 public:
  explicit JoinTable(std::int32_t num_ranks) : offers_(num_ranks) {}

  // INVALID_ARGUMENT for a rank outside [1, num_ranks) (the leader's own place is not joined),
  // ALREADY_EXISTS for a place that is taken.
  absl::Status Join(RankOffer offer);

  // Waits until every follower has joined, then checks that they brought what the leader brings.
  // The result has all ranks' offers in order, `own` first. FAILED_PRECONDITION names the rank and
  // what both brought. DEADLINE_EXCEEDED names the ranks that did not come.
  absl::StatusOr<std::vector<RankOffer>> WaitForAll(RankOffer own, absl::Time deadline);

 private:
  mutable Mutex mutex_;
  CondVar changed_;
  std::vector<std::optional<RankOffer>> offers_ ABSL_GUARDED_BY(mutex_);
};

}  // namespace weft
