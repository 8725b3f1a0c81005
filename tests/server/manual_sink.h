#pragma once

#include <optional>

#include "absl/status/status.h"
#include "gtest/gtest.h"
#include "server/stream_writer.h"

namespace weft {

// A transport that answers when the test says, and fails the test when a writer breaks its
// contract.
template <typename T>
struct ManualSink : StreamSink<T> {
  void StartWrite(const T& /*message*/) override {
    EXPECT_FALSE(writing) << "two writes in flight";
    EXPECT_FALSE(finished.has_value()) << "write after Finish";
    writing = true;
  }
  void Finish(const absl::Status& status) override {
    EXPECT_FALSE(writing) << "Finish with a write in flight";
    EXPECT_FALSE(finished.has_value()) << "second Finish";
    finished = status;
  }
  bool writing = false;
  std::optional<absl::Status> finished;
};

}  // namespace weft
