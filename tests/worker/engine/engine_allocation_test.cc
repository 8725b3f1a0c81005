// In a binary of its own: it replaces operator new.

#include <cstdlib>
#include <new>

#include "gtest/gtest.h"
#include "tests/worker/engine/simulated_group.h"
#include "worker/engine/engine.h"

namespace {
int num_allocations = 0;
}  // namespace

// noinline: or gcc sees new and free side by side and calls them a mismatch (asan).
[[gnu::noinline]] void* operator new(std::size_t size) {
  ++num_allocations;
  if (void* memory = std::malloc(size)) return memory;
  std::abort();
}
[[gnu::noinline]] void operator delete(void* memory) noexcept { std::free(memory); }
[[gnu::noinline]] void operator delete(void* memory, std::size_t) noexcept { std::free(memory); }

namespace weft {
namespace {

// Steps `engine` with its plans going over the wire format, `in_flight` steps ahead.
class Driver {
 public:
  Driver(const EngineOptions& options, Engine& engine)
      : limits_(LimitsOf(options)), engine_(engine), tokens_(options.max_num_seqs, 7) {}

  void Step() {
    std::optional<StepResult> result;
    if (num_in_flight_ > 0) {
      result = {.step = next_result_++, .token_ids = absl::MakeConstSpan(tokens_).first(num_rows_)};
      --num_in_flight_;
    }
    Launch(engine_.Step(absl::UnixEpoch(), result));
    while (const StepPlan* plan = engine_.Step(absl::UnixEpoch(), std::nullopt)) Launch(plan);
    num_events_ += engine_.TakeEvents().size();
    num_changes_ += engine_.TakeBlockChanges().size();
  }
  std::size_t num_events() const { return num_events_; }
  std::size_t num_changes() const { return num_changes_; }

 private:
  void Launch(const StepPlan* plan) {
    ASSERT_NE(plan, nullptr);
    ++num_in_flight_;
    num_rows_ = plan->num_sampled_rows();
    EncodeStep(absl::MakeConstSpan(tokens_).first(num_rows_), *plan, message_);
    ASSERT_TRUE(DecodeStep(message_, limits_, previous_tokens_, decoded_).ok());
  }

  const PlanLimits limits_;
  Engine& engine_;
  std::vector<std::int32_t> tokens_;
  int num_in_flight_ = 0;
  std::size_t num_rows_ = 0;  // the same in every step: all sequences start together
  std::uint64_t next_result_ = 1;
  std::size_t num_events_ = 0;
  std::size_t num_changes_ = 0;
  std::vector<std::byte> message_;
  std::vector<std::int32_t> previous_tokens_;
  StepPlan decoded_;
};

TEST(EngineAllocationTest, SteadyDecodeAllocatesNothing) {
  for (bool async : {false, true}) {
    const EngineOptions options = {.block_size = 4,
                                   .num_blocks = 4000,
                                   .max_model_len = 1000,
                                   .max_num_seqs = 16,
                                   .vocab_size = 100,
                                   .async_scheduling = async};
    std::unique_ptr<Engine> engine = *Engine::Create(options);
    for (std::uint64_t id = 1; id <= 16; ++id) {
      EngineRequest request;
      request.id = RequestId{id};
      request.prompt_token_ids = {1, 2, static_cast<std::int32_t>(id)};
      request.max_tokens = 900;
      request.deadline = absl::UnixEpoch() + absl::Hours(1);
      ASSERT_TRUE(engine->Add(request, absl::UnixEpoch()).ok());
    }
    Driver driver(options, *engine);
    for (int step = 0; step < 8; ++step) driver.Step();
    const std::size_t events = driver.num_events();
    const int before = num_allocations;
    for (int step = 0; step < 500; ++step) driver.Step();
    EXPECT_EQ(num_allocations - before, 0) << (async ? "async" : "sync");
    EXPECT_GT(driver.num_changes(), 1000u) << "the prefix cache has stored next to nothing";
    EXPECT_EQ(driver.num_events() - events, 500u * 16);
  }
}

}  // namespace
}  // namespace weft
