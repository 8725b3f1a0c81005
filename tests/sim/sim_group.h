#pragma once

#include <cstdint>
#include <functional>
#include <map>
#include <memory>
#include <string>
#include <vector>

#include "router/leader_client.h"
#include "server/stream_writer.h"
#include "tests/sim/virtual_time.h"
#include "tests/worker/engine/simulated_group.h"
#include "worker/engine/engine.h"

namespace weft::sim {

// A group of ranks in virtual time: the real engine behind the real wire format, in front of a
// model that is a hash, with the leader's part of WatchState and Generate around it. It can die,
// hang and come back. Messages take a drawn time; those of one stream keep their order.
class SimGroup {
 public:
  struct Options {
    EngineOptions engine;
    SimulatedModel model;
    Duration max_step_time{20'000};
    Duration max_delay{5'000};  // of a message, one way
  };

  SimGroup(VirtualTime& time, Oracle& oracle, const Options& options);
  ~SimGroup();

  // A wire to it for a router; the group outlives it.
  std::unique_ptr<LeaderClient> NewClient();

  // All ranks are gone: connections break, and what was under way is lost.
  void Kill();
  // From now on it says nothing and computes nothing, but its connections stand.
  void Hang();
  // Loads, for a drawn time, and serves. After Kill() or at the beginning.
  void Restart();

  bool alive() const { return life_ != nullptr; }
  bool IsHung() const;
  int num_deaths() const { return num_deaths_; }
  std::uint64_t num_steps() const { return num_steps_; }
  // Of the prompts of all requests that have ended.
  std::int64_t num_cached_tokens() const { return num_cached_tokens_; }
  // Every request has ended, every block is free, every plan has run.
  bool Idle() const;
  std::string Describe() const;

 private:
  // What dies with the processes. Events of an older life do nothing.
  struct Life;
  class Client;
  class Wire;
  class WatchWire;
  class GenerateWire;

  Duration Delay() { return Duration(Draw(time_.random(), 50, options_.max_delay.count())); }
  // Runs `event` after `delay`, unless this life has ended by then or hangs.
  void InThisLife(Duration delay, std::function<void(Life&)> event);
  void Accept(const std::shared_ptr<GenerateWire>& wire, const v1::WorkerGenerateRequest& request);
  void CancelRequest(RequestId id);
  void PlanSteps(Life& life);
  void RunRanks(Life& life);
  void DeliverEvents(Life& life);
  void Heartbeat(Life& life);
  v1::GroupState State(const Life& life) const;

  VirtualTime& time_;
  Oracle& oracle_;
  const Options options_;
  std::shared_ptr<Life> life_;
  std::vector<std::weak_ptr<Wire>> wires_;  // that are open
  int num_deaths_ = 0;
  std::uint64_t num_steps_ = 0;
  std::int64_t num_cached_tokens_ = 0;
  std::uint64_t next_request_ = 1;
};

}  // namespace weft::sim
