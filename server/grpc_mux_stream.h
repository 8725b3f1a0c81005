#pragma once

#include <cstdint>
#include <functional>
#include <memory>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "grpcpp/support/server_callback.h"
#include "server/mux_writer.h"
#include "weft/v1/worker.pb.h"

namespace weft {

// Worker.Generate over gRPC's callback API: reads commands, and gives their answers a MuxWriter.
// The handler of the method makes one and returns it to gRPC, which deletes it.
class GrpcMuxStream final : public grpc::ServerBidiReactor<v1::GenerateCommand, v1::GenerateEvents>,
                            private StreamSink<v1::GenerateEvents> {
 public:
  // Takes what a router asks for: opens `call` in `mux`, which it may keep, and answers there. May
  // move out of `request`. Runs on a thread of gRPC, one call at a time, and must not wait.
  using StartHandler = std::function<void(v1::WorkerGenerateRequest& request, absl::Time deadline,
                                          MuxWriter& mux, std::uint64_t call)>;

  GrpcMuxStream(const MuxWriterOptions& options, StartHandler on_start);

 private:
  using Reactor = grpc::ServerBidiReactor<v1::GenerateCommand, v1::GenerateEvents>;

  void StartWrite(const v1::GenerateEvents& message) override { Reactor::StartWrite(&message); }
  // gRPC may delete us before this returns.
  void Finish(const absl::Status& status) override;

  void OnReadDone(bool ok) override;
  void OnWriteDone(bool ok) override { mux()->OnWriteDone(ok); }
  void OnCancel() override { mux()->End(absl::CancelledError("cancelled by the reader")); }
  void OnDone() override {
    mux_->OnDone();
    delete this;
  }
  void Take(v1::GenerateCommand& command);

  // A copy: what is done with it may lead to OnDone() on another thread.
  std::shared_ptr<MuxWriter> mux() const { return mux_; }

  const StartHandler on_start_;
  const std::shared_ptr<MuxWriter> mux_;
  v1::GenerateCommand command_;
};

}  // namespace weft
