#include "worker/engine/step_plan.h"

#include <cstdlib>
#include <limits>
#include <random>
#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {

bool operator==(const PlanSequence& a, const PlanSequence& b) {
  return a.slot == b.slot && a.num_rows == b.num_rows && a.first_position == b.first_position &&
         a.num_sampled == b.num_sampled && a.num_scored == b.num_scored;
}
bool operator==(const BlockTableDelta& a, const BlockTableDelta& b) {
  return a.slot == b.slot && a.first_index == b.first_index && a.num_blocks == b.num_blocks;
}
bool operator==(const SamplingDelta& a, const SamplingDelta& b) {
  return a.slot == b.slot && a.params == b.params;
}
bool operator==(const KvOp& a, const KvOp& b) {
  return a.kind == b.kind && a.last == b.last && a.slot == b.slot && a.transfer == b.transfer &&
         a.first_position == b.first_position && a.end_position == b.end_position &&
         (a.target == nullptr ? b.target == nullptr
                              : b.target != nullptr && *a.target == *b.target);
}
bool operator==(const StepPlan& a, const StepPlan& b) {
  return a.step == b.step && a.sampling_deltas == b.sampling_deltas &&
         a.table_deltas == b.table_deltas && a.delta_blocks == b.delta_blocks &&
         a.kv_ops == b.kv_ops && a.sequences == b.sequences && a.token_ids == b.token_ids;
}

namespace {

using ::testing::HasSubstr;

constexpr PlanLimits kLimits = {.max_num_seqs = 8,
                                .max_num_batched_tokens = 32,
                                .max_blocks_per_seq = 16,
                                .num_blocks = 64,
                                .vocab_size = 100,
                                .max_model_len = 256};

using Random = std::mt19937_64;

std::int64_t Draw(Random& random, std::int64_t min, std::int64_t max) {
  return std::uniform_int_distribution<std::int64_t>(min, max)(random);
}

struct Message {
  std::vector<std::int32_t> previous_tokens;
  StepPlan plan;
};

// Any message that fits kLimits.
Message RandomMessage(Random& random) {
  Message message;
  message.previous_tokens.resize(Draw(random, 0, kLimits.max_num_batched_tokens));
  for (auto& token : message.previous_tokens) token = Draw(random, -2, kLimits.vocab_size - 1);
  StepPlan& plan = message.plan;
  plan.step = std::max<std::uint64_t>(1, random());
  plan.sampling_deltas.resize(Draw(random, 0, kLimits.max_num_seqs));
  for (auto& delta : plan.sampling_deltas) {
    delta.slot = Draw(random, 0, kLimits.max_num_seqs - 1);
    delta.params = {.temperature = Draw(random, 0, 20) / 10.0f,
                    .top_p = Draw(random, 1, 10) / 10.0f,
                    .top_k = static_cast<std::int32_t>(Draw(random, 0, 1 << 30)),
                    .min_p = Draw(random, 0, 10) / 10.0f,
                    .seed = random(),
                    .whole_row = Draw(random, 0, 1) == 1};
  }
  plan.table_deltas.resize(Draw(random, 0, kLimits.max_num_seqs));
  for (auto& delta : plan.table_deltas) {
    delta.slot = Draw(random, 0, kLimits.max_num_seqs - 1);
    delta.first_index = Draw(random, 0, kLimits.max_blocks_per_seq - 1);
    delta.num_blocks = Draw(random, 1, kLimits.max_blocks_per_seq - delta.first_index);
    for (int i = 0; i < delta.num_blocks; ++i) {
      plan.delta_blocks.push_back(Draw(random, 0, kLimits.num_blocks - 1));
    }
  }
  const std::int64_t num_sequences = Draw(random, 0, kLimits.max_num_seqs);
  std::int64_t logits_left = kLimits.max_num_seqs;
  for (std::int64_t i = 0; i < num_sequences; ++i) {
    const std::int32_t rows = Draw(random, 1, 4);
    plan.sequences.push_back(
        {.slot = static_cast<std::int32_t>(Draw(random, 0, kLimits.max_num_seqs - 1)),
         .num_rows = rows,
         .first_position = Draw(random, 0, kLimits.max_model_len - rows),
         .num_sampled = static_cast<std::int32_t>(
             Draw(random, 0, std::min<std::int64_t>(rows, logits_left)))});
    PlanSequence& sequence = plan.sequences.back();
    logits_left -= sequence.num_sampled;
    sequence.num_scored =
        Draw(random, 0, std::min<std::int64_t>(rows - sequence.num_sampled, logits_left));
    logits_left -= sequence.num_scored;
    for (int row = 0; row < rows; ++row) {
      plan.token_ids.push_back(Draw(random,
                                    -static_cast<std::int64_t>(message.previous_tokens.size()),
                                    kLimits.vocab_size - 1));
    }
  }
  for (std::int64_t i = Draw(random, 0, 3); i > 0; --i) {
    KvOp op = {.kind = static_cast<KvOp::Kind>(Draw(random, 0, 3)),
               .last = Draw(random, 0, 1) == 1,
               .slot = static_cast<std::int32_t>(Draw(random, 0, kLimits.max_num_seqs - 1)),
               .transfer = static_cast<std::uint64_t>(Draw(random, 0, std::int64_t{1} << 60))};
    op.end_position = Draw(random, 0, kLimits.max_model_len);
    op.first_position = Draw(random, 0, op.end_position);
    if (op.kind == KvOp::Kind::kSend) {
      op.target = std::make_shared<const std::string>(Draw(random, 1, 50), 'x');
    }
    message.plan.kv_ops.push_back(std::move(op));
  }
  return message;
}

std::vector<std::byte> Encode(const Message& message) {
  std::vector<std::byte> bytes;
  EncodeStep(message.previous_tokens, message.plan, bytes);
  return bytes;
}

absl::Status Decode(absl::Span<const std::byte> bytes, Message& message) {
  return DecodeStep(bytes, kLimits, message.previous_tokens, message.plan);
}

absl::Status Decode(const Message& message) {
  Message decoded;
  return Decode(Encode(message), decoded);
}

int Rounds() {
  const char* rounds = std::getenv("WEFT_PROPERTY_ROUNDS");
  return rounds == nullptr ? 1000 : std::atoi(rounds);
}

TEST(StepPlanTest, DecodingGivesBackWhatWasEncoded) {
  Message decoded;  // reused: what an earlier message left must not show
  for (int seed = 0; seed < Rounds(); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const Message message = RandomMessage(random);
    const absl::Status status = Decode(Encode(message), decoded);
    ASSERT_TRUE(status.ok()) << status;
    ASSERT_EQ(decoded.previous_tokens, message.previous_tokens);
    ASSERT_TRUE(decoded.plan == message.plan);
  }
}

TEST(StepPlanTest, BytesAreLittleEndianAndPacked) {
  Message message;
  message.plan.step = 0x0102030405060708;
  message.previous_tokens = {-1};
  const std::vector<std::byte> bytes = Encode(message);
  const unsigned char expected[] = {
      'W', 'E', 'F', 'T',              // magic
      3,   0,   0,   0,                // version
      8,   7,   6,   5,   4, 3, 2, 1,  // step
      1,   0,   0,   0,   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 0,   0,   0,   0,
      0,   0,   0,   0,   0, 0, 0, 0, 0, 0, 0, 0, 0, 0, 255, 255, 255, 255};  // the previous token
  ASSERT_EQ(bytes.size(), sizeof(expected));
  for (std::size_t i = 0; i < bytes.size(); ++i) {
    EXPECT_EQ(std::to_integer<int>(bytes[i]), expected[i]) << "byte " << i;
  }
}

TEST(StepPlanTest, RefusesEveryTruncationAndTrailingBytes) {
  for (int seed = 0; seed < 20; ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    Message decoded;
    const std::vector<std::byte> bytes = Encode(RandomMessage(random));
    for (std::size_t size = 0; size < bytes.size(); ++size) {
      // A copy of exactly this size, so that a sanitizer sees a read past its end.
      const std::vector<std::byte> part(bytes.begin(), bytes.begin() + size);
      ASSERT_EQ(Decode(part, decoded).code(), absl::StatusCode::kInvalidArgument) << size;
    }
    std::vector<std::byte> longer = bytes;
    longer.push_back(std::byte{0});
    ASSERT_EQ(Decode(longer, decoded).code(), absl::StatusCode::kInvalidArgument);
  }
}

void ExpectFits(const Message& message) {
  const StepPlan& plan = message.plan;
  ASSERT_LE(plan.sequences.size(), kLimits.max_num_seqs);
  ASSERT_LE(plan.token_ids.size(), kLimits.max_num_batched_tokens);
  std::int64_t rows = 0;
  for (const PlanSequence& sequence : plan.sequences) {
    ASSERT_TRUE(sequence.slot >= 0 && sequence.slot < kLimits.max_num_seqs);
    ASSERT_TRUE(sequence.num_rows >= 1 && sequence.first_position >= 0);
    ASSERT_LE(sequence.first_position + sequence.num_rows, kLimits.max_model_len);
    ASSERT_TRUE(sequence.num_sampled >= 0 && sequence.num_scored >= 0);
    ASSERT_LE(sequence.num_sampled + sequence.num_scored, sequence.num_rows);
    rows += sequence.num_rows;
  }
  ASSERT_EQ(rows, plan.num_rows());
  ASSERT_LE(plan.num_logits_rows(), kLimits.max_num_seqs);
  for (std::int32_t token : plan.token_ids) {
    ASSERT_LT(token, kLimits.vocab_size);
    ASSERT_LT(~token, static_cast<std::int64_t>(message.previous_tokens.size()));
  }
  std::int64_t blocks = 0;
  for (const BlockTableDelta& delta : plan.table_deltas) {
    ASSERT_TRUE(delta.slot >= 0 && delta.slot < kLimits.max_num_seqs);
    ASSERT_TRUE(delta.first_index >= 0 && delta.num_blocks >= 1);
    ASSERT_LE(delta.first_index + delta.num_blocks, kLimits.max_blocks_per_seq);
    blocks += delta.num_blocks;
  }
  ASSERT_EQ(blocks, plan.delta_blocks.size());
  for (std::int32_t block : plan.delta_blocks) {
    ASSERT_TRUE(block >= 0 && block < kLimits.num_blocks);
  }
}

TEST(StepPlanTest, CorruptedMessagesAreRefusedOrFitTheLimits) {
  Message decoded;
  for (int seed = 0; seed < Rounds(); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    const std::vector<std::byte> good = Encode(RandomMessage(random));
    for (int round = 0; round < 20; ++round) {
      std::vector<std::byte> bytes = good;
      for (std::int64_t flips = Draw(random, 1, 4); flips > 0; --flips) {
        // Half of the corruption hits the header's counts, where it can do most.
        const std::int64_t end = Draw(random, 0, 1) == 0 ? 40 : bytes.size();
        bytes[Draw(random, 0, end - 1)] = static_cast<std::byte>(Draw(random, 0, 255));
      }
      if (Decode(bytes, decoded).ok()) ExpectFits(decoded);
      if (testing::Test::HasFatalFailure()) return;
    }
  }
}

TEST(StepPlanTest, RandomBytesAreRefusedOrFitTheLimits) {
  Message decoded;
  for (int seed = 0; seed < Rounds(); ++seed) {
    SCOPED_TRACE(testing::Message() << "seed " << seed);
    Random random(seed);
    std::vector<std::byte> bytes = Encode(Message{.plan = {.step = 1}});
    bytes.resize(Draw(random, 0, 400));
    for (std::size_t i = 8; i < bytes.size(); ++i) bytes[i] = static_cast<std::byte>(random());
    if (Decode(bytes, decoded).ok()) ExpectFits(decoded);
    if (testing::Test::HasFatalFailure()) return;
  }
}

// A plan of one sequence with one block: the base of the edge tests.
Message SmallMessage() {
  Message message;
  message.previous_tokens = {7};
  message.plan.step = 1;
  message.plan.sampling_deltas = {{.slot = 0}};
  message.plan.table_deltas = {{.slot = 0, .first_index = 0, .num_blocks = 1}};
  message.plan.delta_blocks = {0};
  message.plan.sequences = {{.slot = 0, .num_rows = 1, .first_position = 0, .num_sampled = 1}};
  message.plan.token_ids = {5};
  return message;
}

TEST(StepPlanTest, LimitsHoldAtTheirEdges) {
  struct Case {
    const char* what;
    void (*set)(Message&, std::int64_t);
    std::int64_t min, max;
  };
  const Case cases[] = {
      {"previous token", [](Message& m, std::int64_t v) { m.previous_tokens[0] = v; }, -2, 99},
      {"slot of a sampling delta",
       [](Message& m, std::int64_t v) { m.plan.sampling_deltas[0].slot = v; }, 0, 7},
      {"slot of a table delta", [](Message& m, std::int64_t v) { m.plan.table_deltas[0].slot = v; },
       0, 7},
      {"first index of a table delta",
       [](Message& m, std::int64_t v) { m.plan.table_deltas[0].first_index = v; }, 0, 15},
      {"blocks of a table delta",
       [](Message& m, std::int64_t v) {
         m.plan.table_deltas[0].num_blocks = v;
         m.plan.delta_blocks.resize(std::max<std::int64_t>(v, 0));
       },
       1, 16},
      {"block", [](Message& m, std::int64_t v) { m.plan.delta_blocks[0] = v; }, 0, 63},
      {"slot of a sequence", [](Message& m, std::int64_t v) { m.plan.sequences[0].slot = v; }, 0,
       7},
      {"rows",
       [](Message& m, std::int64_t v) {
         m.plan.sequences[0].num_rows = v;
         m.plan.token_ids.resize(std::max<std::int64_t>(v, 0));
       },
       1, 32},
      {"first position of a sequence",
       [](Message& m, std::int64_t v) { m.plan.sequences[0].first_position = v; }, 0, 255},
      {"sampled rows of a sequence",
       [](Message& m, std::int64_t v) { m.plan.sequences[0].num_sampled = v; }, 0, 1},
      {"scored rows of a sequence",
       [](Message& m, std::int64_t v) {
         m.plan.sequences[0].num_rows = 3;
         m.plan.token_ids = {5, 5, 5};
         m.plan.sequences[0].num_scored = v;
       },
       0, 2},
      {"token", [](Message& m, std::int64_t v) { m.plan.token_ids[0] = v; }, -1, 99},
      {"top_k", [](Message& m, std::int64_t v) { m.plan.sampling_deltas[0].params.top_k = v; }, 0,
       std::numeric_limits<std::int32_t>::max()},
  };
  for (const Case& c : cases) {
    for (std::int64_t value : {c.min, c.max}) {
      Message message = SmallMessage();
      c.set(message, value);
      EXPECT_TRUE(Decode(message).ok()) << c.what << " " << value << ": " << Decode(message);
    }
    for (std::int64_t value : {c.min - 1, c.max + 1}) {
      if (value != static_cast<std::int32_t>(value)) continue;
      Message message = SmallMessage();
      c.set(message, value);
      const absl::Status status = Decode(message);
      EXPECT_EQ(status.code(), absl::StatusCode::kInvalidArgument) << c.what << " " << value;
      EXPECT_THAT(std::string(status.message()), HasSubstr(c.what));
    }
  }
}

TEST(StepPlanTest, RowsWithLogitsAreAtMostMaxNumSeqs) {
  Message message = SmallMessage();
  message.plan.sequences[0].num_rows = 10;
  message.plan.token_ids.assign(10, 5);
  message.plan.sequences[0].num_scored = 7;
  EXPECT_TRUE(Decode(message).ok()) << Decode(message);
  message.plan.sequences[0].num_scored = 8;
  EXPECT_THAT(std::string(Decode(message).message()),
              HasSubstr("number of rows with logits is 9; allowed is 0 to 8"));
}

TEST(StepPlanTest, HugeValuesDoNotOverflowTheChecks) {
  Message message = SmallMessage();
  message.plan.sequences[0].first_position = std::numeric_limits<std::int64_t>::max();
  EXPECT_FALSE(Decode(message).ok());
  message = SmallMessage();
  message.plan.table_deltas[0].first_index = std::numeric_limits<std::int32_t>::max();
  EXPECT_FALSE(Decode(message).ok());
  message = SmallMessage();
  message.plan.table_deltas[0].num_blocks = std::numeric_limits<std::int32_t>::max();
  EXPECT_FALSE(Decode(message).ok());
}

TEST(StepPlanTest, RefusesWrongMagicVersionAndStepZero) {
  Message decoded;
  std::vector<std::byte> bytes = Encode(SmallMessage());
  bytes[0] ^= std::byte{1};
  EXPECT_THAT(std::string(Decode(bytes, decoded).message()), HasSubstr("magic"));
  bytes = Encode(SmallMessage());
  bytes[4] ^= std::byte{3};
  EXPECT_THAT(std::string(Decode(bytes, decoded).message()), HasSubstr("version is 0"));
  Message message = SmallMessage();
  message.plan.step = 0;
  EXPECT_THAT(std::string(Decode(message).message()), HasSubstr("step is 0"));
}

TEST(StepPlanTest, SamplingOutOfRangeIsRefused) {
  const float nan = std::numeric_limits<float>::quiet_NaN();
  const float infinity = std::numeric_limits<float>::infinity();
  for (float temperature : {-0.1f, nan, infinity, -infinity}) {
    EXPECT_FALSE(ValidateSampling({.temperature = temperature}).ok()) << temperature;
  }
  for (float top_p : {0.0f, -1.0f, 1.0001f, nan}) {
    EXPECT_FALSE(ValidateSampling({.top_p = top_p}).ok()) << top_p;
  }
  for (float min_p : {-0.1f, 1.0001f, nan}) {
    EXPECT_FALSE(ValidateSampling({.min_p = min_p}).ok()) << min_p;
  }
  EXPECT_TRUE(ValidateSampling({.min_p = 1}).ok());
  EXPECT_FALSE(ValidateSampling({.top_k = -1}).ok());
  EXPECT_TRUE(ValidateSampling({.temperature = 0, .top_p = 1, .top_k = 0}).ok());
  EXPECT_TRUE(ValidateSampling({.temperature = 2, .top_p = 1e-6f, .top_k = 1}).ok());
}

}  // namespace
}  // namespace weft
