#include "router/router_service.h"

#include <algorithm>
#include <chrono>
#include <memory>
#include <string>
#include <utility>

#include "absl/time/clock.h"
#include "fmt/format.h"
#include "router/text/detokenizer.h"
#include "router/unary_call.h"
#include "server/base/bounded_time.h"
#include "server/base/status_macros.h"
#include "server/error_reason.h"
#include "server/version.h"

namespace weft {
namespace {

// How long the last statuses have to be read before the server closes its connections: a client
// that writes into a closed one (a window update, a ping) may lose what it has not read yet.
constexpr absl::Duration kLinger = absl::Milliseconds(250);
// For the last statuses to go out once all requests are ended.
constexpr auto kLastStatuses = std::chrono::seconds(1);

absl::Status DoTokenize(const GenerateContext& context, const v1::TokenizeRequest& request,
                        v1::TokenizeResponse& response) {
  absl::StatusOr<std::vector<std::int32_t>> ids;
  switch (request.prompt_case()) {
    case v1::TokenizeRequest::kText:
      RETURN_IF_ERROR(ValidateText(request.text(), context.limits));
      ids = EncodeText(context, request.text());
      break;
    case v1::TokenizeRequest::kChat:
      RETURN_IF_ERROR(ValidateChat(request.chat(), context.limits));
      ids = EncodeChat(context, request.chat());
      break;
    case v1::TokenizeRequest::PROMPT_NOT_SET:
      return absl::InvalidArgumentError("the request has nothing to tokenize; set text or chat");
  }
  if (!ids.ok()) return ids.status();
  response.mutable_token_ids()->Add(ids->begin(), ids->end());
  return absl::OkStatus();
}

absl::Status DoDetokenize(const GenerateContext& context, const v1::DetokenizeRequest& request,
                          v1::DetokenizeResponse& response) {
  if (context.tokenizer == nullptr) {
    return absl::FailedPreconditionError("this router runs with --skip-tokenizer-init: no text");
  }
  if (request.token_ids_size() > context.limits.max_detokenize_tokens) {
    return absl::InvalidArgumentError(
        fmt::format("{} token_ids; at most {} are allowed (--max-detokenize-tokens)",
                    request.token_ids_size(), context.limits.max_detokenize_tokens));
  }
  // A model's vocabulary may be padded: such ids have no text.
  std::int32_t vocab_size = context.tokenizer->vocab_size();
  const auto snapshot = context.cluster->Snapshot();
  for (const auto& group : snapshot->groups) {
    vocab_size = std::max(vocab_size, group->vocab_size);
  }
  RETURN_IF_ERROR(ValidateTokenRange(request.token_ids(), vocab_size, "token_ids"));
  const bool skip = !request.has_skip_special_tokens() || request.skip_special_tokens();
  response.set_text(Detokenize(*context.tokenizer, request.token_ids(), skip));
  return absl::OkStatus();
}

absl::Status DescribeModel(const GenerateContext& context, v1::GetModelInfoResponse& response) {
  bool ready = false;
  const auto snapshot = context.cluster->Snapshot();
  for (const auto& group : snapshot->groups) {
    if (!group->TakesRequests()) continue;
    ready = true;
    response.set_max_model_len(
        std::max<std::int64_t>(response.max_model_len(), group->info.max_model_len()));
    response.set_vocab_size(group->vocab_size);
    response.mutable_eos_token_ids()->Assign(group->eos_token_ids.begin(),
                                             group->eos_token_ids.end());
  }
  if (!ready) return WithReason(absl::UnavailableError("no group is ready"), kReasonNotReady);
  response.set_model(context.limits.served_model_name);
  response.set_text(context.tokenizer != nullptr);
  response.set_chat(context.chat_template != nullptr);
  response.set_max_logprobs(static_cast<std::int32_t>(context.limits.max_logprobs));
  return absl::OkStatus();
}

// Empty when the client sent none that is one.
std::string TraceparentOf(const grpc::CallbackServerContext& call) {
  const auto found = call.client_metadata().find("traceparent");
  if (found == call.client_metadata().end()) return "";
  const std::string value(found->second.data(), found->second.size());
  return IsTraceparent(value) ? value : "";
}

}  // namespace

void RouterService::Drain(absl::Duration timeout) {
  RequestRegistry& registry = *context_.registry;
  registry.StartDrain();
  const auto now = std::chrono::steady_clock::now;
  const auto limit = ToBoundedChrono(timeout);
  if (!registry.WaitForNoStreams(now() + limit)) {
    for (const auto& call : registry.All()) {
      call->End(RouterDrains());
    }
    registry.WaitForNoStreams(now() + kLastStatuses);
  }
  absl::SleepFor(kLinger);
}

// Whose call it is: null when the router knows no tenants.
absl::StatusOr<std::shared_ptr<Tenant>> RouterService::Authenticate(
    const grpc::CallbackServerContext& call) const {
  if (context_.tenants == nullptr) return std::shared_ptr<Tenant>();
  return context_.tenants->Authenticate(BearerToken(call));
}

// Counts a call, now and when it ends, and tells the access log.
ResponseStream::EndHandler RouterService::EndHandler(std::chrono::system_clock::time_point deadline,
                                                     const Tenant* tenant,
                                                     std::shared_ptr<const AccessRecord> record) {
  RouterMetrics* const metrics = context_.metrics;
  if (metrics != nullptr) metrics->OnRequest();
  return [metrics, deadline, record = std::move(record), &log = context_.access_log,
          name = tenant == nullptr ? "" : tenant->name()](const absl::Status& status,
                                                          v1::FinishReason last, bool sent) {
    // gRPC cancels a call whose deadline passes. The client's end does so first: a deadline travels
    // as the time that is left, so here it is later by what the call took to come.
    constexpr std::chrono::milliseconds kTravel{100};
    const bool late =
        absl::IsCancelled(status) && std::chrono::system_clock::now() >= deadline - kTravel;
    const absl::Status end = late ? absl::DeadlineExceededError("") : status;
    if (metrics != nullptr) metrics->OnEnd(end, last, sent, name);
    if (record != nullptr) log(record->Line(end, last, absl::Now()));
  };
}

grpc::ServerWriteReactor<grpc::ByteBuffer>* RouterService::Generate(
    grpc::CallbackServerContext* call, const grpc::ByteBuffer* request) {
  const absl::StatusOr<std::shared_ptr<Tenant>> admitted = Authenticate(*call);
  const std::shared_ptr<Tenant> tenant = admitted.ok() ? *admitted : nullptr;
  v1::GenerateRequest parsed;
  absl::Status status = admitted.status();
  if (status.ok()) status = ParseRequest(*request, parsed);
  const std::uint64_t first_seq = parsed.resume_seq();
  const std::string traceparent = TraceparentOf(*call);
  std::shared_ptr<AccessRecord> record;
  if (context_.access_log != nullptr) {
    record = std::make_shared<AccessRecord>(tenant == nullptr ? "" : tenant->name(), traceparent,
                                            absl::Now());
  }
  auto generate = std::make_shared<GenerateCall>(context_, std::move(parsed), call->deadline(),
                                                 tenant, traceparent, record);

  StreamWriterOptions<v1::GenerateResponse> options = ResponseStreamOptions(context_);
  options.on_cancel = [weak = std::weak_ptr<GenerateCall>(generate)] {
    if (const auto alive = weak.lock()) alive->End(absl::CancelledError("cancelled by the client"));
  };
  auto* stream = new ResponseStream(*context_.registry, first_seq, std::move(options),
                                    EndHandler(call->deadline(), tenant.get(), record));
  if (status.ok()) {
    generate->Start(stream->writer());
  } else {
    stream->writer()->Finish(std::move(status));
  }
  return stream;
}

grpc::ServerUnaryReactor* RouterService::Abort(grpc::CallbackServerContext* call,
                                               const grpc::ByteBuffer* request,
                                               grpc::ByteBuffer* response) {
  const absl::StatusOr<std::shared_ptr<Tenant>> tenant = Authenticate(*call);
  return UnaryCall<v1::AbortRequest, v1::AbortResponse>::Start(
      tenant.status(), *request, response, nullptr,
      [this, tenant](const v1::AbortRequest& abort, v1::AbortResponse&) {
        const std::string key = NameOf(tenant->get(), abort.request_id());
        if (const auto found = context_.registry->Find(key)) found->Abort();
        return absl::OkStatus();
      });
}

class RouterService::TextCall {
 public:
  explicit TextCall(RequestRegistry& registry) : registry_(registry) { registry_.OpenStream(); }
  ~TextCall() { registry_.CloseStream(); }
  TextCall(const TextCall&) = delete;
  TextCall& operator=(const TextCall&) = delete;

  std::unique_ptr<Tenant::Place> place;  // null when the router knows no tenants

 private:
  RequestRegistry& registry_;
};

absl::StatusOr<std::shared_ptr<RouterService::TextCall>> RouterService::StartTextCall(
    const grpc::CallbackServerContext& call) const {
  ASSIGN_OR_RETURN(const std::shared_ptr<Tenant> tenant, Authenticate(call));
  auto text_call = std::make_shared<TextCall>(*context_.registry);
  RETURN_IF_ERROR(context_.registry->CheckDrain());
  if (tenant != nullptr) {
    ASSIGN_OR_RETURN(text_call->place, tenant->StartRequest(absl::Now()));
  }
  return text_call;
}

grpc::ServerUnaryReactor* RouterService::Tokenize(grpc::CallbackServerContext* call,
                                                  const grpc::ByteBuffer* request,
                                                  grpc::ByteBuffer* response) {
  const auto text_call = StartTextCall(*call);
  return UnaryCall<v1::TokenizeRequest, v1::TokenizeResponse>::Start(
      text_call.status(), *request, response, context_.text_pool,
      [this, text_call](const auto& in, auto& out) { return DoTokenize(context_, in, out); });
}

grpc::ServerUnaryReactor* RouterService::Detokenize(grpc::CallbackServerContext* call,
                                                    const grpc::ByteBuffer* request,
                                                    grpc::ByteBuffer* response) {
  const auto text_call = StartTextCall(*call);
  return UnaryCall<v1::DetokenizeRequest, v1::DetokenizeResponse>::Start(
      text_call.status(), *request, response, context_.text_pool,
      [this, text_call](const auto& in, auto& out) { return DoDetokenize(context_, in, out); });
}

grpc::ServerUnaryReactor* RouterService::GetModelInfo(grpc::CallbackServerContext* call,
                                                      const grpc::ByteBuffer* request,
                                                      grpc::ByteBuffer* response) {
  return UnaryCall<v1::GetModelInfoRequest, v1::GetModelInfoResponse>::Start(
      Authenticate(*call).status(), *request, response, nullptr,
      [this](const auto&, auto& out) { return DescribeModel(context_, out); });
}

grpc::ServerUnaryReactor* RouterService::GetServerInfo(grpc::CallbackServerContext* call,
                                                       const grpc::ByteBuffer* request,
                                                       grpc::ByteBuffer* response) {
  return UnaryCall<v1::GetServerInfoRequest, v1::GetServerInfoResponse>::Start(
      Authenticate(*call).status(), *request, response, nullptr,
      [this](const auto&, v1::GetServerInfoResponse& out) {
        out.set_version(std::string(Version()));
        out.set_metrics_address(context_.metrics_address);
        const auto snapshot = context_.cluster->Snapshot();
        for (const auto& group : snapshot->groups) {
          *out.add_groups() = group->info;
        }
        return absl::OkStatus();
      });
}

}  // namespace weft
