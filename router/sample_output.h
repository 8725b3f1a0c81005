#pragma once

#include <cstdint>
#include <optional>

#include "absl/types/span.h"
#include "router/text/output_text.h"
#include "router/text/tokenizer.h"
#include "weft/v1/inference.pb.h"
#include "weft/v1/worker.pb.h"

namespace weft {

// What a client sees of one sample, made from what the leader sends: text, usage, stop strings.
// Pure: no thread, no clock, no gRPC. One thread at a time.
class SampleOutput {
 public:
  // `tokenizer` outlives this; null: no text.
  SampleOutput(const Tokenizer* tokenizer, const v1::SamplingParams& sampling, std::int32_t index,
               std::int32_t prompt_tokens);

  // First, if at all: tokens that the client has already. Returns whether they hold a whole stop
  // string: then nothing is to be generated, and `message` is the last one.
  bool Resume(absl::Span<const std::int32_t> ids, v1::GenerateResponse& message);

  // Moves the next message of the leader to `message`. Tokens and logprobs behind the one that
  // completes a stop string are dropped, and the sample is finished. False when there is nothing
  // to send: logprobs of the prompt wait for the first token, and nothing follows a finish.
  bool Read(v1::WorkerGenerateResponse& response, v1::GenerateResponse& message);

  // The leader's messages begin anew, behind the tokens that Read() has passed on.
  void Replay() { prompt_logprobs_.Clear(); }

  // The last message of a sample that is not finished.
  void Abort(v1::GenerateResponse& message);

  bool finished() const { return finished_; }

 private:
  // Appends the text of new tokens; cuts them behind a stop string and finishes.
  void AddText(v1::GenerateResponse& message);
  void Finish(v1::FinishReason reason, v1::GenerateResponse& message);
  void SetUsage(v1::GenerateResponse& message) const;

  const std::int32_t index_;
  const std::int32_t prompt_tokens_;
  const bool include_stop_;
  std::optional<OutputText> text_;
  std::int32_t completion_tokens_ = 0;
  std::int32_t cached_tokens_ = 0;
  bool started_ = false;  // a token was read
  bool finished_ = false;
  google::protobuf::RepeatedPtrField<v1::PositionLogprobs>
      prompt_logprobs_;  // until the first token
};

}  // namespace weft
