#pragma once

#include <cstdint>
#include <memory>
#include <optional>

#include "grpcpp/grpcpp.h"
#include "gtest/gtest.h"
#include "weft/v1/worker.grpc.pb.h"

namespace weft {

// A call of Generate as a router sees it, on a stream of its own.
class GenerateClient {
 public:
  GenerateClient(v1::Worker::Stub& stub, const v1::WorkerGenerateRequest& request)
      : stream_(stub.Generate(&context_)) {
    v1::GenerateCommand command;
    command.set_call(kCall);
    *command.mutable_start() = request;
    stream_->Write(command);
  }
  ~GenerateClient() { context_.TryCancel(); }

  // False at the end of the call.
  bool Read(v1::WorkerGenerateResponse& response) {
    while (next_ == events_.events_size()) {
      if (end_.has_value()) return false;
      next_ = 0;
      if (!stream_->Read(&events_)) {
        end_ = stream_->Finish();
        return false;
      }
      for (const v1::GenerateEvent& event : events_.events()) {
        EXPECT_EQ(event.call(), kCall);
        if (!event.has_end()) continue;
        end_.emplace(static_cast<grpc::StatusCode>(event.end().code()), event.end().message());
      }
    }
    response = events_.events(next_++).response();
    return true;
  }
  // All of it in one message; sets `status`.
  v1::WorkerGenerateResponse ReadAll(grpc::Status& status) {
    v1::WorkerGenerateResponse all;
    v1::WorkerGenerateResponse next;
    while (Read(next)) all.MergeFrom(next);
    status = *end_;
    return all;
  }
  grpc::Status Finish() {
    grpc::Status status;
    ReadAll(status);
    return status;
  }

 private:
  static constexpr std::uint64_t kCall = 7;

  grpc::ClientContext context_;
  std::unique_ptr<grpc::ClientReaderWriter<v1::GenerateCommand, v1::GenerateEvents>> stream_;
  v1::GenerateEvents events_;
  int next_ = 0;
  std::optional<grpc::Status> end_;
};

}  // namespace weft
