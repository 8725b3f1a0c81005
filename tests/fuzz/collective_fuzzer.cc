#include <cstdint>
#include <memory>
#include <vector>

#include "kernels/device/stream.h"
#include "server/base/check.h"
#include "spdlog/spdlog.h"
#include "tests/fuzz/fuzz_input.h"
#include "worker/group/communicator.h"

namespace weft {
namespace {

// A fabric whose one peer sends what the fuzzer says.
class ScriptedFabric final : public Fabric {
 public:
  explicit ScriptedFabric(FuzzInput& input) : input_(input) {}

  std::string LocalAddress() const override { return "scripted"; }
  absl::StatusOr<PeerId> Connect(std::string_view, std::uint32_t) override { return PeerId{0}; }
  void Receive(Channel channel, Handler handler) override {
    if (channel == Channel::kCollective) handler_ = std::move(handler);
  }
  absl::Status Send(PeerId, Channel, absl::Span<const absl::Span<const std::byte>>,
                    Done done) override {
    if (done) done(absl::OkStatus());
    return absl::OkStatus();
  }
  absl::Status PeerStatus(PeerId) const override {
    // Spares the time until a stall.
    return input_.empty() ? absl::UnavailableError("the script has ended") : absl::OkStatus();
  }
  void Disconnect(PeerId) override {}
  bool Progress() override {
    if (input_.empty()) return false;
    const absl::Span<const std::byte> piece = input_.Piece();
    aligned_.assign((piece.size() + 7) / 8, 0);
    std::copy(piece.begin(), piece.end(), reinterpret_cast<std::byte*>(aligned_.data()));
    handler_(/*from_tag=*/input_.Byte() % 3,
             {reinterpret_cast<std::byte*>(aligned_.data()), piece.size()});
    return true;
  }
  void Wait(absl::Duration) override { Progress(); }
  void Wake() override {}
  FabricCounters Counters() const override { return {}; }

 private:
  FuzzInput& input_;
  Handler handler_;
  std::vector<std::uint64_t> aligned_;
};

class NoStream final : public kernels::Stream {
 public:
  kernels::DeviceKind device() const override { return kernels::DeviceKind::kCpu; }
  absl::Status Synchronize() override { return absl::OkStatus(); }
};

absl::Status RunOne(Communicator& communicator, std::uint8_t choice, std::vector<float>& in,
                    std::vector<float>& out, kernels::Stream& stream) {
  const std::int64_t count = choice / 8 % 9;
  switch (choice % 5) {
    case 0:
      return communicator.AllReduceSum(in.data(), count, DType::kFloat32, stream);
    case 1:
      return communicator.AllGather(in.data(), out.data(), 4 * count, stream);
    case 2:
      return communicator.ReduceScatterSum(in.data(), out.data(), count, DType::kFloat32, stream);
    case 3:
      return communicator.AllToAll(in.data(), out.data(), 4 * count, stream);
    default:
      return communicator.Gather(in.data(), out.data(), 4 * count, stream);
  }
}

}  // namespace
}  // namespace weft

// Messages of a peer that follows no protocol: collectives end, with a result or an error, and
// write only where they may. `in` and `out` have exactly the room that two ranks need.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  using namespace weft;
  spdlog::set_level(spdlog::level::off);
  NoStream stream;
  FuzzInput input(data, size);
  ScriptedFabric fabric(input);
  const PeerId peers[] = {PeerId{0}, PeerId{0}};
  const std::uint32_t tags[] = {0, 1};
  const auto communicator =
      MakeFabricCommunicator(MakeCollectiveMux(fabric), 0, peers, tags,
                             {.id = 7, .max_bytes = 64, .stall_timeout = absl::Milliseconds(20)});
  for (int i = 0; i < 4; ++i) {
    const std::uint8_t choice = input.Byte();
    std::vector<float> in(2 * (choice / 8 % 9), 1.0F);
    std::vector<float> out(in.size());
    if (!RunOne(*communicator, choice, in, out, stream).ok()) break;
  }
  return 0;
}
