#include "kernels/cuda/kv_copy.h"

#include <random>

#include "tests/cuda_emu/cuda_test.h"

namespace weft::kernels::cuda {
namespace {

class KvCopyTest : public CudaTest {};
WEFT_IN_EVERY_ORDER(KvCopyTest);

// Rows of `dim` values, some of them scattered in tiles of a message, in any order of places.
struct Case {
  int rows;
  int dim;
  int tile;  // rows whose values alternate in the message
};

template <typename Value>
void Check(const Case& c, CudaStream& stream, std::mt19937_64& random) {
  SCOPED_TRACE(testing::Message() << c.rows << " rows of " << c.dim << " in tiles of " << c.tile);
  const std::size_t count = static_cast<std::size_t>(c.rows * c.tile) * c.dim;
  std::vector<Value> kv(count + 3 * c.dim);
  for (Value& value : kv) value = static_cast<Value>(random());
  std::vector<int> place(static_cast<std::size_t>(c.rows * c.tile) + 3);
  for (std::size_t i = 0; i < place.size(); ++i) place[i] = static_cast<int>(i);
  std::shuffle(place.begin(), place.end(), random);
  std::vector<KvSegment> segments;
  std::vector<Value> wire(count);
  for (int i = 0; i < c.rows * c.tile; ++i) {
    const int first = i / c.tile * c.tile * c.dim + i % c.tile;
    segments.push_back({.place = std::int64_t{place[i]} * c.dim * std::int64_t{sizeof(Value)},
                        .wire = first * static_cast<int>(sizeof(Value)),
                        .count = c.dim,
                        .wire_stride = c.tile});
    for (int j = 0; j < c.dim; ++j) wire[first + j * c.tile] = kv[place[i] * c.dim + j];
  }
  const DeviceArray<KvSegment> on_device(segments, stream);
  const DeviceArray<Value> from(kv, stream);
  const DeviceArray<Value> message(count, stream);
  const DeviceArray<Value> back(std::vector<Value>(kv.size(), Value{7}), stream);
  const auto copy = [&](const DeviceArray<Value>& blocks, KvCopyDirection direction) {
    return KvCopy({.segments = on_device.data(),
                   .kv = reinterpret_cast<std::byte*>(blocks.data()),
                   .wire = reinterpret_cast<std::byte*>(message.data()),
                   .num_segments = static_cast<std::int32_t>(segments.size()),
                   .value_bytes = sizeof(Value),
                   .direction = direction},
                  stream);
  };
  ASSERT_TRUE(copy(from, KvCopyDirection::kGather).ok());
  EXPECT_EQ(message.Read(), wire);
  ASSERT_TRUE(copy(back, KvCopyDirection::kScatter).ok());
  std::vector<Value> want(kv.size(), Value{7});
  for (int i = 0; i < c.rows * c.tile; ++i) {
    std::copy_n(kv.begin() + place[i] * c.dim, c.dim, want.begin() + place[i] * c.dim);
  }
  EXPECT_EQ(back.Read(), want);
}

TEST_P(KvCopyTest, GathersAndScattersWhatItIsTold) {
  std::mt19937_64 random(19);
  for (const Case& c : {Case{0, 8, 1}, Case{1, 1, 1}, Case{3, 8, 1}, Case{40, 128, 1},
                        Case{9, 33, 1}, Case{2, 64, 16}, Case{1, 8, 3}}) {
    Check<std::uint16_t>(c, stream(), random);
    Check<std::uint32_t>(c, stream(), random);
  }
}

TEST_P(KvCopyTest, RefusesOtherSizes) {
  const absl::Status status = KvCopy({.segments = nullptr,
                                      .kv = nullptr,
                                      .wire = nullptr,
                                      .num_segments = 1,
                                      .value_bytes = 1,
                                      .direction = KvCopyDirection::kGather},
                                     stream());
  EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument);
}

}  // namespace
}  // namespace weft::kernels::cuda
