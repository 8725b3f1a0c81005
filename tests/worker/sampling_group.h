#pragma once

#include <filesystem>

#include "absl/time/time.h"
#include "tests/worker/local_group.h"

namespace weft {

// The group that the tests of sampling share.
inline LocalGroupOptions SamplingOptions(const std::filesystem::path& dir, int tp, int dcp) {
  LocalGroupOptions options;
  options.model.model_dir = dir;
  options.model.layout = {.tensor_parallel_size = tp,
                          .decode_context_parallel_size = dcp,
                          .block_size = 16,
                          .interleave = 4};
  options.model.num_blocks = 800;
  options.model.max_model_len = 200;
  options.rank.stall_timeout = absl::Seconds(20);
  return options;
}

}  // namespace weft
