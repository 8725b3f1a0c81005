#pragma once

#include <cstdint>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "tests/worker/local_group.h"
#include "weft/v1/worker.pb.h"

namespace weft {

// A prefill and a decode group in one process, and what a router does between them.
class PdPair {
 public:
  PdPair(LocalGroup& prefill, LocalGroup& decode) : prefill_(prefill), decode_(decode) {}

  // Runs all requests at once; the tokens are the first of the prefill group and then those of the
  // decode group. With a `failure` the decode group is told so instead of the first token.
  std::vector<Completion> Generate(std::vector<EngineRequest> requests, std::string failure = "");

  // How many of them were computed on the decode group after all, and positions that were there.
  int num_recomputed() const { return num_recomputed_; }
  std::int64_t num_cached() const { return num_cached_; }

 private:
  struct Request;
  class DecodeSink;
  class PrefillSink;

  std::shared_ptr<const std::string> Target(const TokenEvent::KvReserved& reserved) const;

  LocalGroup& prefill_;
  LocalGroup& decode_;
  int num_recomputed_ = 0;
  std::int64_t num_cached_ = 0;
};

}  // namespace weft
