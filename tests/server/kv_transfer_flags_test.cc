#include "server/kv_transfer_flags.h"

#include <string>

#include "gmock/gmock.h"
#include "gtest/gtest.h"

namespace weft {
namespace {

using ::testing::HasSubstr;

std::string ErrorOf(std::string_view json) {
  return std::string(ParseKvTransferConfig(json).status().message());
}

TEST(KvTransferConfigTest, ReadsVllmsNames) {
  EXPECT_EQ(ParseKvTransferConfig("")->role, KvRole::kNone);
  const auto producer = ParseKvTransferConfig(R"({"kv_role": "kv_producer"})");
  ASSERT_TRUE(producer.ok());
  EXPECT_TRUE(producer->sends() && !producer->receives() && producer->layerwise);
  const auto both = ParseKvTransferConfig(
      R"({"kv_connector": "UcxConnector", "kv_role": "kv_both", "mode": "blockwise",)"
      R"( "kv_buffer_size": 1024, "shared_memory": false})");
  ASSERT_TRUE(both.ok()) << both.status();
  EXPECT_TRUE(both->sends() && both->receives() && !both->layerwise);
  EXPECT_EQ(both->buffer_bytes, 1024);
  EXPECT_TRUE(producer->shared_memory && !both->shared_memory);
}

TEST(KvTransferConfigTest, RefusesTheRestByName) {
  EXPECT_THAT(ErrorOf("kv_both"), HasSubstr("not JSON"));
  EXPECT_THAT(ErrorOf("[]"), HasSubstr("a JSON object is wanted"));
  EXPECT_THAT(ErrorOf("{}"), HasSubstr("kv_role is missing"));
  EXPECT_THAT(ErrorOf(R"({"kv_role": "both"})"), HasSubstr("kv_role is \"both\""));
  EXPECT_THAT(ErrorOf(R"({"kv_role": 1})"), HasSubstr("kv_role is 1"));
  EXPECT_THAT(ErrorOf(R"({"kv_role": "kv_both", "kv_rank": 0})"),
              HasSubstr("unknown key \"kv_rank\""));
  EXPECT_THAT(ErrorOf(R"({"kv_role": "kv_both", "mode": "pagewise"})"),
              HasSubstr("mode is \"pagewise\"; allowed is \"layerwise\" or \"blockwise\""));
  EXPECT_THAT(ErrorOf(R"({"kv_role": "kv_both", "shared_memory": 1})"),
              HasSubstr("shared_memory is 1; allowed is true or false"));
  EXPECT_THAT(ErrorOf(R"({"kv_connector": "NixlConnector", "kv_role": "kv_both"})"),
              HasSubstr("\"UcxConnector\""));
}

TEST(KvTransferConfigTest, TheBufferHasBounds) {
  for (const char* size : {"1023", "1073741825", "-1", "1e9", "\"1024\""}) {
    EXPECT_THAT(ErrorOf(std::string(R"({"kv_role": "kv_both", "kv_buffer_size": )") + size + "}"),
                HasSubstr("kv_buffer_size is"))
        << size;
  }
  EXPECT_TRUE(
      ParseKvTransferConfig(R"({"kv_role": "kv_both", "kv_buffer_size": 1073741824})").ok());
}

}  // namespace
}  // namespace weft
