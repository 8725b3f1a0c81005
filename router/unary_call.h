#pragma once

#include <atomic>
#include <functional>
#include <memory>
#include <string>
#include <utility>

#include "absl/status/status.h"
#include "fmt/format.h"
#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "router/text_pool.h"
#include "server/grpc_status.h"

namespace weft {

// Parses what gRPC received. INVALID_ARGUMENT instead of gRPC's own answer to a request that does
// not parse (text that is not UTF-8, say): an empty UNIMPLEMENTED.
template <typename Request>
absl::Status ParseRequest(const grpc::ByteBuffer& buffer, Request& request) {
  grpc::ByteBuffer bytes(buffer);  // shares the data; parsing consumes this handle
  if (grpc::GenericDeserialize<grpc::ProtoBufferReader, Request>(&bytes, &request).ok()) return {};
  return absl::InvalidArgumentError(fmt::format(
      "the request is not a {}; its strings have to be UTF-8", Request::descriptor()->full_name()));
}

// The reactor of a unary call that is registered as a raw one. Deletes itself.
template <typename Request, typename Response>
class UnaryCall final : public grpc::ServerUnaryReactor {
 public:
  using Handler = std::function<absl::Status(const Request&, Response&)>;

  // Unless `admitted` is an error, which is the answer then: runs `handler` here, or on `pool` if
  // there is one, so that a long one does not hold one of gRPC's threads; RESOURCE_EXHAUSTED when
  // too many wait there.
  static UnaryCall* Start(absl::Status admitted, const grpc::ByteBuffer& request,
                          grpc::ByteBuffer* response, TextPool* pool, Handler handler) {
    auto* call = new UnaryCall(response, std::move(handler));
    absl::Status status = std::move(admitted);
    if (status.ok()) status = ParseRequest(request, call->request_);
    if (status.ok() && pool != nullptr) {
      status = pool->Submit([call] { call->Run(); });
      if (status.ok()) return call;
    } else if (status.ok()) {
      call->Run();
      return call;
    }
    call->Finish(ToGrpcStatus(status));
    return call;
  }

 private:
  UnaryCall(grpc::ByteBuffer* response, Handler handler)
      : response_(response), handler_(std::move(handler)) {}

  // gRPC may delete us before this returns.
  void Run() {
    if (cancelled_) {
      Finish(grpc::Status::CANCELLED);
      return;
    }
    Response answer;
    const absl::Status status = handler_(request_, answer);
    bool own_buffer = false;
    if (status.ok()) {
      (void)grpc::GenericSerialize<grpc::ProtoBufferWriter, Response>(answer, response_,
                                                                      &own_buffer);
    }
    Finish(ToGrpcStatus(status));
  }

  void OnCancel() override { cancelled_ = true; }
  void OnDone() override { delete this; }

  Request request_;
  grpc::ByteBuffer* const response_;
  const Handler handler_;
  std::atomic<bool> cancelled_{false};
};

}  // namespace weft
