#pragma once

#include <cstdint>
#include <functional>
#include <memory>
#include <utility>

#include "grpcpp/impl/codegen/proto_utils.h"
#include "grpcpp/support/byte_buffer.h"
#include "grpcpp/support/server_callback.h"
#include "router/request_registry.h"
#include "server/grpc_status.h"
#include "server/stream_writer.h"
#include "weft/v1/inference.pb.h"

namespace weft {

// The StreamSink of Inference.Generate. As GrpcStream, but numbers the messages as they leave,
// because waiting ones may be merged, and serializes them itself: the method is registered as a
// raw one, for gRPC answers a request that does not parse (a prompt that is not UTF-8, say) with
// an empty UNIMPLEMENTED.
class ResponseStream final : public grpc::ServerWriteReactor<grpc::ByteBuffer>,
                             private StreamSink<v1::GenerateResponse> {
 public:
  using Writer = StreamWriter<v1::GenerateResponse>;

  // Told once, as the stream's status leaves; `last` is the finish reason of the last message that
  // did, `sent` whether there was one. May be null.
  using EndHandler =
      std::function<void(const absl::Status& status, v1::FinishReason last, bool sent)>;

  // The first message gets `first_seq`. `registry` outlives the server.
  ResponseStream(RequestRegistry& registry, std::uint64_t first_seq,
                 StreamWriterOptions<v1::GenerateResponse> options, EndHandler on_end)
      : registry_(registry),
        on_end_(std::move(on_end)),
        next_seq_(first_seq),
        writer_(std::make_shared<Writer>(static_cast<StreamSink<v1::GenerateResponse>&>(*this),
                                         std::move(options))) {
    registry_.OpenStream();
  }

  // Take it before the reactor is returned to gRPC.
  std::shared_ptr<Writer> writer() const { return writer_; }

 private:
  using Reactor = grpc::ServerWriteReactor<grpc::ByteBuffer>;

  void StartWrite(const v1::GenerateResponse& message) override {
    sent_ = true;
    numbered_ = message;
    numbered_.set_seq(next_seq_++);
    buffer_.Clear();
    bool own_buffer = false;
    (void)grpc::GenericSerialize<grpc::ProtoBufferWriter, v1::GenerateResponse>(numbered_, &buffer_,
                                                                                &own_buffer);
    Reactor::StartWrite(&buffer_);
  }
  // gRPC may delete us before this returns.
  void Finish(const absl::Status& status) override {
    if (on_end_ != nullptr) on_end_(status, numbered_.finish_reason(), sent_);
    Reactor::Finish(ToGrpcStatus(status));
  }

  // On copies: Finish() in one of these may lead to OnDone() on another thread.
  void OnWriteDone(bool ok) override { writer()->OnWriteDone(ok); }
  void OnCancel() override { writer()->OnCancel(); }
  void OnDone() override {
    writer_->OnDone();
    registry_.CloseStream();
    delete this;
  }

  RequestRegistry& registry_;
  const EndHandler on_end_;
  std::uint64_t next_seq_;
  const std::shared_ptr<Writer> writer_;
  bool sent_ = false;
  v1::GenerateResponse numbered_;
  grpc::ByteBuffer buffer_;
};

}  // namespace weft
