#include <cstddef>
#include <cstdint>
#include <cstring>
#include <vector>

#include "server/base/check.h"
#include "worker/engine/step_plan.h"

// A message that is accepted is the one that encoding what was read gives.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  const weft::PlanLimits limits = {.max_num_seqs = 8,
                                   .max_num_batched_tokens = 64,
                                   .max_blocks_per_seq = 16,
                                   .num_blocks = 100,
                                   .vocab_size = 1000,
                                   .max_model_len = 256};
  std::vector<std::int32_t> previous_tokens;
  weft::StepPlan plan;
  if (!weft::DecodeStep({reinterpret_cast<const std::byte*>(data), size}, limits, previous_tokens,
                        plan)
           .ok()) {
    return 0;
  }
  std::vector<std::byte> again;
  weft::EncodeStep(previous_tokens, plan, again);
  CHECK(again.size() == size && std::memcmp(again.data(), data, size) == 0);
  return 0;
}
