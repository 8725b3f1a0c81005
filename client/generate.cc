#include <atomic>
#include <optional>
#include <string>
#include <utility>
#include <vector>

#include "absl/status/statusor.h"
#include "client/batch.h"
#include "client/client_run.h"
#include "client/commands.h"
#include "client/prompts_file.h"
#include "fmt/format.h"
#include "grpcpp/channel.h"
#include "server/base/log.h"
#include "server/base/output.h"
#include "server/base/status_macros.h"
#include "server/grpc_server.h"

namespace weft {
namespace {

struct GenerateFlags {
  std::optional<std::string> prompt;
  std::optional<std::string> prompt_token_ids;
  std::optional<std::string> prompts_file;

  std::optional<std::int32_t> max_tokens;
  std::optional<double> temperature;
  std::optional<double> top_p;
  std::optional<std::int32_t> top_k;
  std::optional<std::uint64_t> seed;
  std::optional<double> min_p;
  std::optional<double> presence_penalty;
  std::optional<double> frequency_penalty;
  std::optional<double> repetition_penalty;
  std::optional<std::int32_t> min_tokens;
  std::vector<std::int32_t> stop_token_ids;
  std::vector<std::string> stop;
  std::optional<bool> ignore_eos;
  std::optional<std::int32_t> logprobs;

  std::string format = "text";
  std::int32_t concurrency = 64;

  void AddTo(OptionParser& parser);
  v1::SamplingParams Sampling() const;
  // Every request, complete. INVALID_ARGUMENT or NOT_FOUND says what is wrong with the input.
  absl::StatusOr<std::vector<v1::GenerateRequest>> Requests() const;
};

void GenerateFlags::AddTo(OptionParser& parser) {
  parser.Group("Prompts");
  parser.Add("--prompt", &prompt, "Text of one prompt");
  parser.Add("--prompt-token-ids", &prompt_token_ids, "Token ids of one prompt: 1,2,3");
  parser.Add("--prompts-file", &prompts_file,
             "A JSON object per line, with prompt or prompt_token_ids and any sampling field");
  parser.Group("Sampling");
  parser.Add("--max-tokens", &max_tokens, "Tokens to generate at most; 16");
  parser.Add("--temperature", &temperature, "0 is greedy; 1");
  parser.Add("--top-p", &top_p, "1");
  parser.Add("--top-k", &top_k, "0 or -1: all tokens; 0");
  parser.Add("--seed", &seed, "Drawn if absent");
  parser.Add("--min-p", &min_p, "Relative to the most probable token; 0");
  parser.Add("--presence-penalty", &presence_penalty, "0");
  parser.Add("--frequency-penalty", &frequency_penalty, "0");
  parser.Add("--repetition-penalty", &repetition_penalty, "Of the prompt's tokens, too; 1");
  parser.Add("--min-tokens", &min_tokens, "No end before; 0");
  parser.AddTexts("--stop", &stop, "Text that ends a completion; may be repeated");
  parser.Add("--stop-token-ids", &stop_token_ids, "Tokens that end a completion");
  parser.Add("--ignore-eos", &ignore_eos, "Go on after the end of the sequence");
  parser.Add("--logprobs", &logprobs, "Most probable tokens per position, shown by --format json");
  parser.Group("Output");
  parser.AddChoice("--format", &format, {"text", "json"}, "json: one line per completion");
  parser.Add("--concurrency", &concurrency, "Requests under way at a time", Range(1, 65536));
}

v1::SamplingParams GenerateFlags::Sampling() const {
  v1::SamplingParams sampling;
  if (max_tokens) sampling.set_max_tokens(*max_tokens);
  if (temperature) sampling.set_temperature(static_cast<float>(*temperature));
  if (top_p) sampling.set_top_p(static_cast<float>(*top_p));
  if (top_k) sampling.set_top_k(*top_k);
  if (seed) sampling.set_seed(*seed);
  if (min_p) sampling.set_min_p(static_cast<float>(*min_p));
  if (presence_penalty) sampling.set_presence_penalty(static_cast<float>(*presence_penalty));
  if (frequency_penalty) sampling.set_frequency_penalty(static_cast<float>(*frequency_penalty));
  if (repetition_penalty) sampling.set_repetition_penalty(static_cast<float>(*repetition_penalty));
  if (min_tokens) sampling.set_min_tokens(*min_tokens);
  for (const std::string& text : stop) sampling.add_stop(text);
  if (logprobs) sampling.set_logprobs(*logprobs);
  if (ignore_eos) sampling.set_ignore_eos(*ignore_eos);
  sampling.mutable_stop_token_ids()->Add(stop_token_ids.begin(), stop_token_ids.end());
  return sampling;
}

absl::StatusOr<std::vector<v1::GenerateRequest>> GenerateFlags::Requests() const {
  if (prompt.has_value() + prompt_token_ids.has_value() + prompts_file.has_value() != 1) {
    return absl::InvalidArgumentError(
        "exactly one of --prompt, --prompt-token-ids and --prompts-file is wanted");
  }
  if (prompts_file) {
    return ReadPromptsFile(*prompts_file, Sampling());
  }
  v1::GenerateRequest request;
  *request.mutable_sampling() = Sampling();
  if (prompt) {
    request.set_text(*prompt);
  } else {
    ASSIGN_OR_RETURN(const std::vector<std::int32_t> ids, ParseTokenIds(*prompt_token_ids));
    request.mutable_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
  }
  return std::vector<v1::GenerateRequest>{std::move(request)};
}

void PrintSummary(const BatchStats& stats, std::size_t num_requests) {
  PrintErr(
      "\n{} request{}{}, {} prompt tokens, {} tokens in {:.2f} s: {:.1f} tokens/s, first token "
      "after {:.0f} ms\n",
      num_requests, num_requests == 1 ? "" : "s",
      stats.failed == 0 ? "" : fmt::format(" ({} failed)", stats.failed), stats.prompt_tokens,
      stats.completion_tokens, absl::ToDoubleSeconds(stats.wall_time),
      static_cast<double>(stats.completion_tokens) / absl::ToDoubleSeconds(stats.wall_time),
      absl::ToDoubleMilliseconds(stats.time_to_first_token));
}

// Sends the requests and prints what comes: a ClientFunction.
int SendAndPrint(const std::shared_ptr<grpc::Channel>& channel,
                 const std::vector<v1::GenerateRequest>& requests, const GenerateFlags& flags,
                 const std::atomic<bool>& cancelled) {
  const auto stub = v1::Inference::NewStub(channel);
  BatchOptions options = {.concurrency = static_cast<std::size_t>(flags.concurrency)};
  const bool one_text = flags.format == "text" && requests.size() == 1;
  if (one_text) {
    options.on_message = [](std::size_t, const v1::GenerateResponse& response) {
      PrintOut(response.text());
    };
  }
  options.on_completion = [&](std::size_t index, const Completion& completion,
                              const RequestTiming&) {
    if (cancelled || OutputFailed()) return;
    if (flags.format == "json") {
      PrintOut(CompletionToJson(index, completion) + "\n");
    } else if (!completion.status.ok()) {
      PrintErr("weft generate: prompt {}: {}\n", index, std::string(completion.status.message()));
    } else {
      PrintOut((one_text ? "" : completion.text) + "\n");
    }
  };
  options.go_on = [] { return !OutputFailed(); };  // else the rest is for nobody
  const BatchStats stats = RunBatch(*stub, requests, options);
  if (!cancelled && !OutputFailed()) PrintSummary(stats, requests.size());
  return stats.failed == 0 ? 0 : 1;
}

}  // namespace

int GenerateCommand(int argc, char** argv) {
  GroupFlags group;
  group.log_level = "warn";
  ServerFlags server;
  GenerateFlags flags;
  OptionParser parser("weft generate",
                      "Completes prompts. Without --address, a router and a group of ranks are "
                      "started for this call and stopped after it.");
  server.AddTo(parser);
  flags.AddTo(parser);
  group.AddTo(parser);
  if (const std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;
  InitLog("weft", group.log_level);
  InitGrpcLog();

  absl::StatusOr<std::vector<v1::GenerateRequest>> requests = flags.Requests();
  absl::Status status = requests.status();
  const absl::StatusOr<GrpcChannelOptions> channel_options =
      CheckServerFlags(server, group, parser);
  status.Update(channel_options.status());
  if (!status.ok()) {
    PrintErr("weft generate: {}\n", std::string(status.message()));
    return kExitConfigError;
  }
  for (v1::GenerateRequest& request : *requests) request.set_model(group.served_model_name);
  return RunClient(
      server, group, parser, *channel_options,
      [&](const std::shared_ptr<grpc::Channel>& channel, const std::atomic<bool>& cancelled) {
        return SendAndPrint(channel, *requests, flags, cancelled);
      });
}

}  // namespace weft
