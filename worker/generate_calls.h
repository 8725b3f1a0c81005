#pragma once

#include <cstdint>
#include <memory>
#include <string>

#include "absl/status/status.h"
#include "server/mux_writer.h"
#include "weft/v1/worker.pb.h"
#include "worker/leader.h"

namespace weft {

// What runs of the Worker.Generate streams of a leader: calls, each from its request to its end.
//
// A request that a router replays comes again with a higher attempt, maybe while an earlier one
// still runs here for nobody: of one request_id only the newest attempt runs. Ids of requests that
// have ended are free again, and not remembered.
//
// Thread-safe.
class GenerateCalls {
 public:
  explicit GenerateCalls(std::int64_t max_stream_buffer_bytes);
  ~GenerateCalls();

  // How the streams that these calls are of have to be made.
  MuxWriterOptions StreamOptions() const;

  // Hands `request` to `leader`, which outlives the call, and answers as `call` of `mux`. A running
  // older attempt ends with ABORTED. ALREADY_EXISTS to the call when the same or a newer attempt
  // runs; an empty request_id is nobody's. Everything else that is wrong is Leader::Submit()'s.
  void Start(MuxWriter& mux, std::uint64_t call, Leader& leader, const std::string& request_id,
             std::uint64_t attempt, EngineRequest request);
  // Lets the running attempt of that request go on; NOT_FOUND when there is none.
  absl::Status ContinueKv(const v1::ContinueKvRequest& request);

  // Ends every running request with `status`.
  void EndAll(const absl::Status& status);

  // Calls whose last message has not been taken by their reader's connection.
  std::int64_t num_open_calls() const;
  // What waits in them.
  std::int64_t stream_buffer_bytes() const;
  // Request ids that are taken.
  std::int64_t num_running_ids() const;

 private:
  class Call;
  struct Table;

  const std::int64_t max_stream_buffer_bytes_;
  const std::shared_ptr<Table> table_;
};

}  // namespace weft
