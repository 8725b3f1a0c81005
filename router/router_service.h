#pragma once

#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "router/generate_call.h"
#include "weft/v1/inference.grpc.pb.h"

namespace weft {

// weft.v1.Inference: the public face of the router. `context` outlives the server and whatever
// context.text_pool and context.cluster still run.
class RouterService final
    : public v1::Inference::WithRawCallbackMethod_Generate<
          v1::Inference::WithCallbackMethod_GetServerInfo<v1::Inference::Service>> {
 public:
  explicit RouterService(const GenerateContext& context) : context_(context) {}

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* call,
                                                       const grpc::ByteBuffer* request) override;

  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* call,
                                          const v1::GetServerInfoRequest* request,
                                          v1::GetServerInfoResponse* response) override;

 private:
  const GenerateContext& context_;
};

}  // namespace weft
