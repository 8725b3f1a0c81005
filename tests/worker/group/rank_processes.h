#pragma once

#include <sys/types.h>

#include <functional>
#include <memory>
#include <optional>
#include <string>
#include <vector>

#include "worker/group/communicator.h"
#include "worker/group/fabric.h"

namespace weft {

// What a rank of a test has.
struct RankContext {
  int rank = 0;
  Fabric* fabric = nullptr;
  std::shared_ptr<CollectiveMux> mux;
  std::vector<PeerId> peers;        // by rank
  std::vector<std::uint32_t> tags;  // by rank
  int control_fd = -1;              // to RankProcesses; -1 on threads

  std::unique_ptr<Communicator> MakeCommunicator(const FabricCommunicatorOptions& options) const {
    return MakeFabricCommunicator(mux, rank, peers, tags, options);
  }
};

// Returns "" or what went wrong.
using RankBody = std::function<std::string(RankContext&)>;

// Runs `body` on `num_ranks` threads and returns their answers by rank. Over local fabrics, or
// what `make_fabric` makes.
std::vector<std::string> RunOnThreads(
    int num_ranks, const RankBody& body,
    const std::function<std::unique_ptr<Fabric>(int rank)>& make_fabric = nullptr);

// Runs `body` in child processes connected by UCX. The parent must not have used UCX: children are
// forked, and UCX does not survive that.
class RankProcesses {
 public:
  // `before_ucx` runs first, in the child.
  RankProcesses(int num_ranks, const RankBody& body,
                const std::function<void(int rank)>& before_ucx = nullptr);
  // Kills what still runs.
  ~RankProcesses();

  pid_t pid(int rank) const { return children_[static_cast<std::size_t>(rank)].pid; }
  // Waits until the rank has written a byte to its control_fd.
  void AwaitByte(int rank);
  // Nothing if the rank is gone already: Join() has its answer.
  void SendByte(int rank);
  // Kills with KILL and reaps.
  void Kill(int rank);
  // Waits for the end of the rank: its answer, or how it died. Reaps the others meanwhile: to UCX
  // a zombie is alive.
  std::string Join(int rank);
  std::vector<std::string> JoinAll();

 private:
  struct Child {
    pid_t pid = -1;
    int fd = -1;  // a socket: addresses, then control bytes
    int answer_fd = -1;
    std::optional<int> exit_status;  // once reaped
  };

  void Reap();

  std::vector<Child> children_;
};

}  // namespace weft
