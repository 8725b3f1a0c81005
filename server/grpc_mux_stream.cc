#include "server/grpc_mux_stream.h"

#include <utility>

#include "absl/time/clock.h"
#include "server/grpc_status.h"

namespace weft {

GrpcMuxStream::GrpcMuxStream(const MuxWriterOptions& options, StartHandler on_start)
    : on_start_(std::move(on_start)),
      mux_(std::make_shared<MuxWriter>(static_cast<StreamSink<v1::GenerateEvents>&>(*this),
                                       options)) {
  StartRead(&command_);
}

void GrpcMuxStream::Finish(const absl::Status& status) { Reactor::Finish(ToGrpcStatus(status)); }

void GrpcMuxStream::OnReadDone(bool ok) {
  if (!ok) {
    // Also when what came is no command: no call could be told, so that all of them have to end.
    mux()->End(absl::CancelledError("the stream of commands has ended"));
    return;
  }
  Take(command_);
  command_ = {};  // a prompt is large, and the next one may be long in coming
  StartRead(&command_);
}

void GrpcMuxStream::Take(v1::GenerateCommand& command) {
  const std::shared_ptr<MuxWriter> mux = mux_;
  switch (command.command_case()) {
    case v1::GenerateCommand::kStart: {
      const absl::Time deadline = command.has_timeout_us()
                                      ? absl::Now() + absl::Microseconds(command.timeout_us())
                                      : absl::InfiniteFuture();
      on_start_(*command.mutable_start(), deadline, *mux, command.call());
      return;
    }
    case v1::GenerateCommand::kCancel:
      mux->Cancel(command.call());
      return;
    case v1::GenerateCommand::COMMAND_NOT_SET:
      mux->End(absl::InvalidArgumentError("a command that this leader does not know"));
  }
}

}  // namespace weft
