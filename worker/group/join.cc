#include "worker/group/join.h"

#include <chrono>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "server/base/bounded_time.h"

namespace weft {

absl::Status JoinTable::Join(RankOffer offer) {
  MutexLock lock(mutex_);
  const auto num_ranks = static_cast<std::int32_t>(offers_.size());
  if (offer.rank < 1 || offer.rank >= num_ranks) {
    return absl::InvalidArgumentError(
        fmt::format("rank {} joins a group of {}; followers are 1 to {}", offer.rank, num_ranks,
                    num_ranks - 1));
  }
  std::optional<RankOffer>& place = offers_[offer.rank];
  if (place.has_value()) {
    return absl::AlreadyExistsError(fmt::format("rank {} has joined already", offer.rank));
  }
  place = std::move(offer);
  changed_.NotifyAll();
  return absl::OkStatus();
}

absl::StatusOr<std::vector<RankOffer>> JoinTable::WaitForAll(RankOffer own, absl::Time deadline) {
  MutexLock lock(mutex_);
  offers_[0] = std::move(own);
  const auto until = std::chrono::steady_clock::now() + ToBoundedChrono(deadline - absl::Now());
  for (;;) {
    std::string missing;
    for (std::size_t r = 0; r < offers_.size(); ++r) {
      if (!offers_[r].has_value()) missing += fmt::format("{}{}", missing.empty() ? "" : ", ", r);
    }
    if (missing.empty()) break;
    if (!changed_.WaitUntil(mutex_, until)) {
      return absl::DeadlineExceededError(fmt::format("ranks {} did not join", missing));
    }
  }

  std::vector<RankOffer> all;
  for (const std::optional<RankOffer>& offer : offers_) {
    if (offer->agreed != offers_[0]->agreed) {
      return absl::FailedPreconditionError(
          fmt::format("rank {} brings {{{}}}, the leader {{{}}}; all ranks need the same model, "
                      "layout and flags",
                      offer->rank, offer->agreed, offers_[0]->agreed));
    }
    all.push_back(*offer);
  }
  return all;
}

}  // namespace weft
