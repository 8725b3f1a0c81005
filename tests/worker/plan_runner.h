#pragma once

#include <functional>
#include <vector>

#include "absl/types/span.h"
#include "gtest/gtest.h"
#include "server/base/status_macros.h"
#include "tests/worker/local_group.h"

namespace weft {

using Logits = std::vector<std::vector<float>>;  // [rows][vocab]

// Runs sequences alone on the leader of a group that gathers all logits, in slot 0, whose blocks
// are given out from the last one down.
class PlanRunner {
 public:
  PlanRunner(Rank& rank, const LocalGroupOptions& options) : rank_(rank) {
    const auto blocks =
        static_cast<std::int32_t>(*options.model.max_model_len / *options.model.layout.block_size);
    plan_.table_deltas = {{.slot = 0, .first_index = 0, .num_blocks = blocks}};
    for (int i = 0; i < blocks; ++i) {
      plan_.delta_blocks.push_back(*options.model.num_blocks - 1 - i);
    }
  }

  // Runs `ids` as positions [first, first + ids.size()); the last num_sampled rows' logits are
  // appended to `logits`.
  absl::Status Run(absl::Span<const std::int32_t> ids, std::int64_t first, int num_sampled,
                   Logits& logits) {
    ++plan_.step;
    plan_.sequences = {{.slot = 0,
                        .num_rows = static_cast<std::int32_t>(ids.size()),
                        .first_position = first,
                        .num_sampled = num_sampled}};
    plan_.token_ids.assign(ids.begin(), ids.end());
    RETURN_IF_ERROR(rank_.RunStep(plan_).status());
    for (int i = 0; i < num_sampled; ++i) {
      const absl::Span<const float> row = rank_.runner().Logits(i);
      logits.emplace_back(row.begin(), row.end());
    }
    return absl::OkStatus();
  }

  // A prompt in chunks; the logits after its last token.
  absl::Status Prompt(absl::Span<const std::int32_t> ids, std::size_t chunk, Logits& logits) {
    for (std::size_t at = 0; at < ids.size(); at += chunk) {
      const auto part = ids.subspan(at, chunk);
      const bool last = at + part.size() == ids.size();
      RETURN_IF_ERROR(Run(part, static_cast<std::int64_t>(at), last ? 1 : 0, logits));
    }
    return absl::OkStatus();
  }

 private:
  Rank& rank_;
  StepPlan plan_;
};

// Runs `body` on the leader of a group. max_model_len, block_size and num_blocks are given.
inline void OnLeader(LocalGroupOptions options,
                     const std::function<absl::Status(PlanRunner&)>& body) {
  absl::Status status = absl::UnknownError("not run");
  options.drive = [&](Rank& rank) {
    PlanRunner runner(rank, options);
    status = body(runner);
    return status;
  };
  absl::Status started;
  { started = LocalGroup::Start(options).status(); }
  EXPECT_TRUE(started.ok()) << started;
  EXPECT_TRUE(status.ok()) << status;
}

}  // namespace weft
