#pragma once

#include <memory>
#include <utility>

#include "grpcpp/support/server_callback.h"
#include "server/grpc_status.h"
#include "server/stream_writer.h"

namespace weft {

// StreamSink over gRPC's callback API, nothing else. A handler of a server-streaming call makes
// one, gives writer() to the producer and returns the reactor to gRPC, which deletes it:
//
//   grpc::ServerWriteReactor<Response>* Generate(grpc::CallbackServerContext*, const Request* r) {
//     auto* stream = new GrpcStream<Response>(options);
//     Submit(*r, stream->writer());  // may Write() and Finish() at once
//     return stream;
//   }
//
// OnCancel comes after the handler has returned, so on_cancel never overtakes Submit(). It also
// comes when the call's deadline passes.
template <typename T>
class GrpcStream final : public grpc::ServerWriteReactor<T>, private StreamSink<T> {
 public:
  explicit GrpcStream(StreamWriterOptions<T> options)
      : writer_(std::make_shared<StreamWriter<T>>(static_cast<StreamSink<T>&>(*this),
                                                  std::move(options))) {}

  // Take it before the reactor is returned to gRPC.
  std::shared_ptr<StreamWriter<T>> writer() const { return writer_; }

 private:
  using Reactor = grpc::ServerWriteReactor<T>;

  void StartWrite(const T& message) override { Reactor::StartWrite(&message); }
  // gRPC may delete us before this returns.
  void Finish(const absl::Status& status) override { Reactor::Finish(ToGrpcStatus(status)); }

  // The copies: Finish() in one of these may lead to OnDone() on another thread.
  void OnWriteDone(bool ok) override { Writer()->OnWriteDone(ok); }
  void OnCancel() override { Writer()->OnCancel(); }
  void OnDone() override {
    writer_->OnDone();
    delete this;
  }

  std::shared_ptr<StreamWriter<T>> Writer() const { return writer_; }

  const std::shared_ptr<StreamWriter<T>> writer_;
};

}  // namespace weft
