#include "router/router_service.h"

#include <memory>
#include <string>
#include <utility>

#include "grpcpp/impl/codegen/proto_utils.h"
#include "router/response_stream.h"
#include "server/version.h"

namespace weft {

grpc::ServerWriteReactor<grpc::ByteBuffer>* RouterService::Generate(
    grpc::CallbackServerContext* call, const grpc::ByteBuffer* request) {
  v1::GenerateRequest parsed;
  grpc::ByteBuffer bytes(*request);  // shares the data; parsing consumes this handle
  const bool valid =
      grpc::GenericDeserialize<grpc::ProtoBufferReader, v1::GenerateRequest>(&bytes, &parsed).ok();
  auto generate = std::make_shared<GenerateCall>(context_, std::move(parsed), call->deadline());

  StreamWriterOptions<v1::GenerateResponse> options = ResponseStreamOptions(context_);
  options.on_cancel = [weak = std::weak_ptr<GenerateCall>(generate)] {
    if (const auto alive = weak.lock()) alive->OnClientGone();
  };
  auto* stream = new ResponseStream(std::move(options));
  if (valid) {
    generate->Start(stream->writer());
  } else {
    stream->writer()->Finish(absl::InvalidArgumentError(
        "the request is not a weft.v1.GenerateRequest; its strings have to be UTF-8"));
  }
  return stream;
}

grpc::ServerUnaryReactor* RouterService::GetServerInfo(grpc::CallbackServerContext* call,
                                                       const v1::GetServerInfoRequest* /*request*/,
                                                       v1::GetServerInfoResponse* response) {
  response->set_version(std::string(Version()));
  for (const auto& group : context_.cluster->Snapshot()->groups) {
    *response->add_groups() = group->info;
  }
  grpc::ServerUnaryReactor* reactor = call->DefaultReactor();
  reactor->Finish(grpc::Status::OK);
  return reactor;
}

}  // namespace weft
