#pragma once

#include <cstdint>
#include <functional>
#include <random>
#include <vector>

#include "absl/time/time.h"
#include "absl/types/span.h"
#include "client/batch.h"
#include "client/completion.h"
#include "weft/v1/inference.grpc.pb.h"

namespace weft {

// Sessions as agents have them: a long beginning that all share, and turns whose prompts are
// everything that was said before and something new, a tool's answer.
struct AgenticLoad {
  std::int32_t num_sessions = 16;
  std::int32_t num_turns = 8;
  std::int32_t prefix_len = 2048;  // tokens that all sessions begin with
  std::int32_t session_len = 0;    // behind those, a session's own: what it is about
  std::int32_t turn_len = 256;     // new ones of a turn
  std::int32_t output_len = 64;    // generated in a turn
  std::int32_t vocab_size = 256;
  std::uint64_t seed = 0;
};

// One of them. The same prompts for the same load, index and completions.
class AgenticSession {
 public:
  AgenticSession(const AgenticLoad& load, std::int32_t index);

  // Adds a turn's new tokens; token ids, with max_tokens set and ignore_eos.
  v1::GenerateRequest NextTurn();
  // Adds what the turn generated.
  void Append(absl::Span<const std::int32_t> token_ids);

 private:
  void Draw(std::int32_t count);

  const AgenticLoad load_;
  std::mt19937_64 random_;
  std::vector<std::int32_t> tokens_;
};

// Runs all sessions, at most `concurrency` at a time, each of them turn after turn, and returns
// when the last one has ended, with the time that took. A session ends with a turn that fails.
// `prepare` completes a request. Both functions run on several threads, one at a time.
absl::Duration RunSessions(v1::Inference::Stub& stub, const AgenticLoad& load,
                           std::int32_t concurrency,
                           const std::function<void(v1::GenerateRequest& request)>& prepare,
                           const std::function<void(const Completion& completion,
                                                    const RequestTiming& timing)>& on_completion);

}  // namespace weft
