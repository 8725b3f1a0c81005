#include "worker/generate_request.h"

#include <cstddef>
#include <memory>
#include <string_view>
#include <utility>

#include "fmt/format.h"
#include "server/base/check.h"
#include "server/base/draw.h"
#include "server/base/status_macros.h"
#include "server/error_reason.h"

namespace weft {
namespace {

// Of a message that is being merged: each merge looks at all of them.
constexpr int kMaxMergedPositions = 256;

constexpr std::size_t kMaxRequestIdBytes = 256;  // 128 of a client, and what a router adds

absl::Status CheckAtMost(std::string_view field, std::int64_t seen, std::int64_t limit,
                         std::string_view flag) {
  if (seen <= limit) return absl::OkStatus();
  return absl::InvalidArgumentError(
      fmt::format("{} has {} entries; at most {} are allowed ({})", field, seen, limit, flag));
}

absl::Status CheckCounts(const v1::SamplingParams& in, const WorkerLimits& limits) {
  RETURN_IF_ERROR(CheckAtMost("stop_token_ids", in.stop_token_ids_size(), limits.max_stop_token_ids,
                              "--max-stop-token-ids"));
  RETURN_IF_ERROR(
      CheckAtMost("logit_bias", in.logit_bias_size(), limits.max_logit_bias, "--max-logit-bias"));
  RETURN_IF_ERROR(CheckAtMost("allowed_token_ids", in.allowed_token_ids_size(),
                              limits.max_allowed_token_ids, "--max-allowed-token-ids"));
  RETURN_IF_ERROR(CheckAtMost("bad_words_token_ids", in.bad_words_token_ids_size(),
                              limits.max_bad_word_sequences, "--max-bad-word-sequences"));
  for (int i = 0; i < in.bad_words_token_ids_size(); ++i) {
    RETURN_IF_ERROR(
        CheckAtMost(fmt::format("bad_words_token_ids[{}]", i), in.bad_words_token_ids(i).ids_size(),
                    limits.max_bad_word_sequence_tokens, "--max-bad-word-sequence-tokens"));
  }
  return absl::OkStatus();
}

// The number of most probable tokens; -1 is all of them, where the limit is -1.
absl::StatusOr<std::int32_t> NumLogprobs(std::string_view field, std::int32_t asked,
                                         std::int32_t limit, std::int32_t vocab_size) {
  if (limit == -1 && asked == -1) return vocab_size;
  const std::int32_t most = limit == -1 ? vocab_size : limit;
  if (asked >= 0 && asked <= most) return asked;
  return absl::InvalidArgumentError(fmt::format("{} is {}; allowed is {} to {} (--max-logprobs)",
                                                field, asked, limit == -1 ? -1 : 0, most));
}

absl::StatusOr<LogitsParams> ToLogitsParams(const v1::SamplingParams& in, const ModelTokens& model,
                                            const WorkerLimits& limits) {
  LogitsParams out;
  out.presence_penalty = in.presence_penalty();
  out.frequency_penalty = in.frequency_penalty();
  if (in.has_repetition_penalty()) out.repetition_penalty = in.repetition_penalty();
  out.min_tokens = in.min_tokens();
  if (out.min_tokens != 0) {
    // Also with ignore_eos: what ends a text is not to be in its first tokens.
    out.ending_tokens.assign(model.eos_token_ids.begin(), model.eos_token_ids.end());
    out.ending_tokens.insert(out.ending_tokens.end(), in.stop_token_ids().begin(),
                             in.stop_token_ids().end());
  }
  out.logit_bias.assign(in.logit_bias().begin(), in.logit_bias().end());
  out.allowed_token_ids.assign(in.allowed_token_ids().begin(), in.allowed_token_ids().end());
  for (const v1::TokenIds& word : in.bad_words_token_ids()) {
    out.bad_words.emplace_back(word.ids().begin(), word.ids().end());
  }
  if (in.has_logprobs()) {
    ASSIGN_OR_RETURN(out.logprobs,
                     NumLogprobs("logprobs", in.logprobs(), limits.max_logprobs, model.vocab_size));
  }
  if (in.has_prompt_logprobs()) {
    ASSIGN_OR_RETURN(out.prompt_logprobs, NumLogprobs("prompt_logprobs", in.prompt_logprobs(),
                                                      limits.max_logprobs, model.vocab_size));
  }
  return out;
}

v1::TokenLogprob ToProto(const TokenLogprob& in) {
  v1::TokenLogprob out;
  out.set_token_id(in.token_id);
  out.set_logprob(in.logprob);
  out.set_rank(in.rank);
  return out;
}

void FillProto(const PositionLogprobs& in, v1::PositionLogprobs& out) {
  *out.mutable_token() = ToProto(in.token);
  out.mutable_top()->Reserve(static_cast<int>(in.top.size()));
  for (const TokenLogprob& top : in.top) *out.add_top() = ToProto(top);
}

}  // namespace

absl::StatusOr<EngineRequest> ToEngineRequest(const v1::WorkerGenerateRequest& request,
                                              const ModelTokens& model, const WorkerLimits& limits,
                                              absl::Time deadline) {
  const v1::SamplingParams& in = request.sampling();
  if (!in.has_seed()) {
    return absl::InvalidArgumentError("sampling.seed is missing; routers always give one");
  }
  if (request.request_id().size() > kMaxRequestIdBytes) {
    return absl::InvalidArgumentError(fmt::format("request_id has {} bytes; at most {} are allowed",
                                                  request.request_id().size(), kMaxRequestIdBytes));
  }
  RETURN_IF_ERROR(CheckCounts(in, limits));
  EngineRequest out;
  out.prompt_token_ids.assign(request.prompt_token_ids().begin(), request.prompt_token_ids().end());
  out.resume_token_ids.assign(request.resume_token_ids().begin(), request.resume_token_ids().end());
  out.priority = request.priority();
  out.cache_salt = request.cache_salt();
  out.deadline = deadline;
  if (in.has_max_tokens()) out.max_tokens = in.max_tokens();
  out.stop_token_ids.assign(in.stop_token_ids().begin(), in.stop_token_ids().end());
  out.eos_token_ids.assign(model.eos_token_ids.begin(), model.eos_token_ids.end());
  out.ignore_eos = in.ignore_eos();
  if (in.has_temperature()) out.sampling.temperature = in.temperature();
  if (in.has_top_p()) out.sampling.top_p = in.top_p();
  if (in.top_k() != -1) out.sampling.top_k = in.top_k();  // -1 is off, too
  out.sampling.min_p = in.min_p();
  out.sampling.seed = in.seed();
  ASSIGN_OR_RETURN(LogitsParams logits, ToLogitsParams(in, model, limits));
  if (logits.IsNeutral()) return out;
  out.logits = std::make_shared<const LogitsParams>(std::move(logits));
  return out;
}

absl::Status SetHandoff(const v1::WorkerGenerateRequest& request, const std::string& own_format,
                        EngineRequest& out) {
  if (!request.has_kv_receive() && !request.has_kv_send()) return absl::OkStatus();
  const std::string& format =
      request.has_kv_send() ? request.kv_send().endpoint().format() : request.kv_receive();
  if (format != own_format) {
    return WithReason(
        absl::FailedPreconditionError(fmt::format(
            "the other group's KV is \"{}\"; that of this group is \"{}\"", format, own_format)),
        kReasonKvTransferFailed);
  }
  if (out.logits != nullptr && out.logits->prompt_logprobs.has_value()) {
    return absl::InvalidArgumentError("prompt_logprobs and a hand-off exclude each other");
  }
  if (!request.has_kv_send()) {
    do {
      out.kv_transfer = DrawUint64();
    } while (out.kv_transfer == 0);
    return absl::OkStatus();
  }
  const v1::KvTarget& target = request.kv_send();
  const auto num_tokens = static_cast<std::int64_t>(out.prompt_token_ids.size()) +
                          static_cast<std::int64_t>(out.resume_token_ids.size());
  if (target.transfer_id() == 0 || target.first_position() < 0 ||
      target.first_position() >= num_tokens || target.ByteSizeLong() > kMaxKvTargetBytes) {
    return absl::InvalidArgumentError(fmt::format(
        "kv_send: transfer {} from position {}, {} bytes; allowed are ids other than 0, positions "
        "below {}, {} bytes",
        target.transfer_id(), target.first_position(), target.ByteSizeLong(), num_tokens,
        kMaxKvTargetBytes));
  }
  out.kv_transfer = target.transfer_id();
  out.kv_first_position = target.first_position();
  out.kv_target = std::make_shared<const std::string>(target.SerializeAsString());
  return absl::OkStatus();
}

v1::WorkerGenerateResponse ToResponse(const TokenEvent& event) {
  v1::WorkerGenerateResponse response;
  response.set_first_output_index(event.output_index);
  response.set_kv_failure(event.kv_failure);
  if (event.kv_reserved.has_value()) {
    response.mutable_kv_reserved()->set_transfer_id(event.kv_reserved->transfer);
    response.mutable_kv_reserved()->set_first_position(event.kv_reserved->first_position);
  }
  if (event.token_id.has_value()) response.add_token_ids(*event.token_id);
  response.set_cached_tokens(event.num_cached_tokens);
  if (event.logprobs.has_value()) FillProto(*event.logprobs, *response.add_logprobs());
  for (const PositionLogprobs& position : event.prompt_logprobs) {
    FillProto(position, *response.add_prompt_logprobs());
  }
  switch (event.finish) {
    case FinishReason::kNone:
    case FinishReason::kHandedOff:
      break;
    case FinishReason::kEos:
      response.set_ended_by_eos(true);
      [[fallthrough]];
    case FinishReason::kStopToken:
      response.set_finish_reason(v1::FINISH_REASON_STOP);
      break;
    case FinishReason::kLength:
      response.set_finish_reason(v1::FINISH_REASON_LENGTH);
      break;
    default:
      CHECK_MSG(false, "an error is not a message");
  }
  return response;
}

std::int64_t ResponseBytes(const v1::WorkerGenerateResponse& response) {
  constexpr std::int64_t kEntry = sizeof(TokenLogprob);
  std::int64_t bytes = 16 + 4 * std::int64_t{response.token_ids_size()};
  for (const auto* positions : {&response.logprobs(), &response.prompt_logprobs()}) {
    for (const v1::PositionLogprobs& position : *positions) {
      bytes += kEntry * (1 + position.top_size());
    }
  }
  return bytes;
}

bool MergeResponses(v1::WorkerGenerateResponse& into, v1::WorkerGenerateResponse& next) {
  if (into.logprobs_size() + into.prompt_logprobs_size() >= kMaxMergedPositions) return false;
  const bool has_tokens = into.token_ids_size() > 0;
  const std::int32_t first = into.first_output_index();
  into.MergeFrom(next);
  if (has_tokens) into.set_first_output_index(first);
  return true;
}

}  // namespace weft
