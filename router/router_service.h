#pragma once

#include <chrono>

#include "absl/time/time.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "router/generate_call.h"
#include "router/response_stream.h"
#include "weft/v1/inference.grpc.pb.h"

namespace weft {

// weft.v1.Inference: the public face of the router. `context` outlives the server and whatever
// context.text_pool and context.cluster still run.
//
// With tenants, every call needs the key of one ("authorization: Bearer KEY").
//
// Every method is a raw one, so that a request that does not parse gets an answer of ours.
class RouterService final
    : public v1::Inference::WithRawCallbackMethod_Generate<
          v1::Inference::WithRawCallbackMethod_Abort<v1::Inference::WithRawCallbackMethod_Tokenize<
              v1::Inference::WithRawCallbackMethod_Detokenize<
                  v1::Inference::WithRawCallbackMethod_GetModelInfo<
                      v1::Inference::WithRawCallbackMethod_GetServerInfo<
                          v1::Inference::Service>>>>>> {
 public:
  explicit RouterService(const GenerateContext& context) : context_(context) {}

  // Refuses new requests, and text, as DRAINING, gives those in flight `timeout`, and ends the rest
  // as DRAINING. Returns when the last status has gone out. The server still listens.
  void Drain(absl::Duration timeout);

  grpc::ServerWriteReactor<grpc::ByteBuffer>* Generate(grpc::CallbackServerContext* call,
                                                       const grpc::ByteBuffer* request) override;
  grpc::ServerUnaryReactor* Abort(grpc::CallbackServerContext* call,
                                  const grpc::ByteBuffer* request,
                                  grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Tokenize(grpc::CallbackServerContext* call,
                                     const grpc::ByteBuffer* request,
                                     grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* Detokenize(grpc::CallbackServerContext* call,
                                       const grpc::ByteBuffer* request,
                                       grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetModelInfo(grpc::CallbackServerContext* call,
                                         const grpc::ByteBuffer* request,
                                         grpc::ByteBuffer* response) override;
  grpc::ServerUnaryReactor* GetServerInfo(grpc::CallbackServerContext* call,
                                          const grpc::ByteBuffer* request,
                                          grpc::ByteBuffer* response) override;

 private:
  absl::StatusOr<std::shared_ptr<Tenant>> Authenticate(
      const grpc::CallbackServerContext& call) const;
  // A call that needs the tokenizer. Of a tenant with limits: Generate()'s are its limits.
  class TextCall;
  absl::StatusOr<std::shared_ptr<TextCall>> StartTextCall(
      const grpc::CallbackServerContext& call) const;
  ResponseStream::EndHandler EndHandler(std::chrono::system_clock::time_point deadline,
                                        const Tenant* tenant,
                                        std::shared_ptr<const AccessRecord> record);

  const GenerateContext& context_;
};

}  // namespace weft
