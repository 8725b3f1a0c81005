// Stands in for weft-worker in cli_test.cc: serves weft.v1.Worker without a model. It answers a
// prompt [n, ...] with n + 1, n + 2, ... up to max_tokens, one token every 10 ms, and
//   [1, ...]    is refused with RESOURCE_EXHAUSTED;
//   [2, ...]    never gets a token.
// A model directory whose name has "broken" in it is a configuration error.

#include <atomic>
#include <string>
#include <thread>
#include <vector>

#include "absl/time/clock.h"
#include "server/exit_codes.h"
#include "server/group_flags.h"
#include "server/metrics_server.h"
#include "server/options.h"
#include "server/signals.h"
#include "server/supervisor_link.h"
#include "tests/router/fake_worker.h"

namespace weft {
namespace {

void Answer(const std::shared_ptr<FakeWorker::Call>& call) {
  const std::int32_t first = call->request().prompt_token_ids(0);
  if (first == 1) {
    call->End(WithReason(absl::ResourceExhaustedError("too much"), kReasonOutOfLimits));
    return;
  }
  if (first == 2) {
    call->WaitUntilCancelled();
    return;
  }
  const int max_tokens = call->request().sampling().max_tokens();
  for (int i = 1; i <= max_tokens; ++i) {
    absl::SleepFor(absl::Milliseconds(10));
    call->Send({first + i},
               i == max_tokens ? v1::FINISH_REASON_LENGTH : v1::FINISH_REASON_UNSPECIFIED);
  }
  call->End();
}

int Main(int argc, char** argv) {
  TerminationSignals signals;
  SupervisorLink link;
  GroupFlags flags;
  std::string listen;
  std::int32_t local_ranks = 0;
  std::int32_t max_failed_starts = 0;
  MetricsFlags metrics;
  OptionParser parser("fake-leader", "For tests.");
  flags.AddTo(parser);
  metrics.AddTo(parser, "ignored");
  parser.Add("--listen", &listen, "Where");
  parser.Add("--local-ranks", &local_ranks, "Ignored");
  parser.Add("--max-failed-starts", &max_failed_starts, "Ignored");
  if (const auto exit_code = parser.Parse(argc, argv)) return *exit_code;
  if (flags.model.find("broken") != std::string::npos) {
    fprintf(stderr, "fake-leader: %s is broken\n", flags.model.c_str());
    return kExitConfigError;
  }
  v1::GroupState state = FakeWorker::ReadyState();
  state.mutable_group()->set_model(flags.ServedModelName());
  state.mutable_group()->set_tensor_parallel_size(local_ranks);
  state.mutable_group()->set_decode_context_parallel_size(flags.decode_context_parallel_size);
  state.mutable_group()->set_block_size(flags.block_size.value_or(0));
  state.mutable_group()->add_ranks()->set_pid(getpid());
  auto worker = std::make_unique<FakeWorker>(listen, state);
  std::thread([&worker] {
    while (true) std::thread(Answer, worker->TakeCall()).detach();
  }).detach();
  link.ReportReady({{"address", listen}});
  signals.Wait();
  std::_Exit(0);  // the threads above never end
}

}  // namespace
}  // namespace weft

int main(int argc, char** argv) { return weft::Main(argc, argv); }
