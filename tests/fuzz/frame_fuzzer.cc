#include <cstdint>
#include <string_view>

#include "server/base/check.h"
#include "spdlog/spdlog.h"
#include "tests/fuzz/fuzz_input.h"
#include "worker/group/frame_assembler.h"
#include "worker/group/ucx_address.h"

namespace {

// Whatever comes, a message is readable, aligned, and as long as its header says.
class CheckingSink final : public weft::FrameAssembler::Sink {
 public:
  void OnMessage(const weft::FrameHeader& header, absl::Span<const std::byte> payload) override {
    CHECK(header.channel < weft::kNumChannels);
    CHECK(payload.size() == header.message_bytes);
    CHECK(payload.empty() || reinterpret_cast<std::uintptr_t>(payload.data()) % 8 == 0);
    for (const std::byte byte : payload) sum_ = sum_ + static_cast<unsigned>(byte);
  }

 private:
  volatile unsigned sum_ = 0;
};

}  // namespace

// Frames from the wire, and the address that a peer sends.
extern "C" int LLVMFuzzerTestOneInput(const std::uint8_t* data, std::size_t size) {
  spdlog::set_level(spdlog::level::off);
  const std::string_view text(reinterpret_cast<const char*>(data), size);
  if (const auto address = weft::DecodeFabricAddress(text); address.ok()) {
    CHECK(weft::EncodeFabricAddress(*address) == text);
  }
  CheckingSink sink;
  weft::FrameAssembler assembler(sink);
  for (weft::FuzzInput input(data, size); !input.empty();) assembler.Accept(input.Piece());
  return 0;
}
