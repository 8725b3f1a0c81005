#include "worker/model/safetensors.h"

#include <sys/stat.h>

#include <cmath>
#include <cstring>
#include <fstream>
#include <limits>
#include <string>
#include <utility>
#include <vector>

#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "tests/golden.h"
#include "tests/temp_dir.h"
#include "worker/model/safetensors_header.h"

namespace weft {
namespace {

using nlohmann::json;
using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;

// A file as the format says: length, header, data.
std::string FileBytes(const std::string& header, const std::string& data) {
  std::string bytes(8, '\0');
  const std::uint64_t size = header.size();
  std::memcpy(bytes.data(), &size, sizeof(size));
  return bytes + header + data;
}

template <typename T>
std::string Bytes(const std::vector<T>& values) {
  return {reinterpret_cast<const char*>(values.data()), values.size() * sizeof(T)};
}

void Write(const std::filesystem::path& path, const std::string& bytes) {
  std::filesystem::create_directories(path.parent_path());
  std::ofstream(path, std::ios::binary) << bytes;
}

std::string MessageOf(const absl::Status& status) {
  return fmt::format("{}: {}", absl::StatusCodeToString(status.code()),
                     std::string(status.message()));
}

// One [3, 4] matrix of 0..11 in each float type, and a vector.
std::string SmallFile() {
  std::vector<float> f32;
  std::vector<std::uint16_t> bf16;
  std::vector<std::uint16_t> f16;
  for (int i = 0; i < 12; ++i) {
    f32.push_back(static_cast<float>(i));
    std::uint32_t bits = 0;
    std::memcpy(&bits, &f32.back(), sizeof(bits));
    bf16.push_back(static_cast<std::uint16_t>(bits >> 16));
    const int exponent = i == 0 ? 0 : std::ilogb(i);
    f16.push_back(static_cast<std::uint16_t>(
        i == 0 ? 0 : ((exponent + 15) << 10) + (((i << 10) >> exponent) & 0x3FF)));
  }
  const json header = {
      {"__metadata__", {{"format", "pt"}}},
      {"f32", {{"dtype", "F32"}, {"shape", {3, 4}}, {"data_offsets", {0, 48}}}},
      {"bf16", {{"dtype", "BF16"}, {"shape", {3, 4}}, {"data_offsets", {48, 72}}}},
      {"f16", {{"dtype", "F16"}, {"shape", {3, 4}}, {"data_offsets", {72, 96}}}},
      {"vector", {{"dtype", "F32"}, {"shape", {4}}, {"data_offsets", {96, 112}}}},
      {"scalar", {{"dtype", "I64"}, {"shape", json::array()}, {"data_offsets", {112, 120}}}},
      {"empty", {{"dtype", "F32"}, {"shape", {0, 4}}, {"data_offsets", {120, 120}}}}};
  const float inf = std::numeric_limits<float>::infinity();
  return FileBytes(header.dump(), Bytes(f32) + Bytes(bf16) + Bytes(f16) +
                                      Bytes<float>({1.5f, -2.0f, inf, 4.0f}) +
                                      Bytes<std::int64_t>({7}));
}

class CheckpointTest : public testing::Test {
 protected:
  absl::StatusOr<std::unique_ptr<Checkpoint>> Open() const { return Checkpoint::Open(dir_.path()); }
  std::filesystem::path Path(const std::string& name) const { return dir_.path() / name; }

  const TempDir dir_;
};

float Element(const kernels::MatrixView& view, std::int64_t row, std::int64_t col) {
  const auto* at = static_cast<const std::byte*>(view.data) +
                   (row * view.row_stride + col) * DTypeBytes(view.dtype);
  if (view.dtype == DType::kFloat32) {
    float value = 0;
    std::memcpy(&value, at, sizeof(value));
    return value;
  }
  std::uint16_t bits = 0;
  std::memcpy(&bits, at, sizeof(bits));
  if (view.dtype == DType::kBFloat16) {
    const std::uint32_t wide = std::uint32_t{bits} << 16;
    float value = 0;
    std::memcpy(&value, &wide, sizeof(value));
    return value;
  }
  if (bits == 0) return 0;
  return std::ldexp(1.0f + static_cast<float>(bits & 0x3FF) / 1024.0f, (bits >> 10) - 15);
}

TEST_F(CheckpointTest, RowsAndColumnsAreViewsOfTheMatrix) {
  Write(Path("model.safetensors"), SmallFile());
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  for (const char* name : {"f32", "bf16", "f16"}) {
    SCOPED_TRACE(name);
    const auto rows = (*checkpoint)->Rows(name, 3, 4, 1, 3);
    ASSERT_TRUE(rows.ok()) << rows.status();
    EXPECT_EQ(rows->rows, 2);
    EXPECT_EQ(rows->cols, 4);
    for (int r = 0; r < 2; ++r) {
      for (int c = 0; c < 4; ++c) {
        EXPECT_EQ(Element(*rows, r, c), static_cast<float>((r + 1) * 4 + c));
      }
    }
    const auto columns = (*checkpoint)->Columns(name, 3, 4, 2, 3);
    ASSERT_TRUE(columns.ok()) << columns.status();
    EXPECT_EQ(columns->rows, 3);
    EXPECT_EQ(columns->cols, 1);
    for (int r = 0; r < 3; ++r) EXPECT_EQ(Element(*columns, r, 0), static_cast<float>(r * 4 + 2));
  }
  EXPECT_EQ((*checkpoint)->Rows("f32", 3, 4, 2, 2)->rows, 0);
}

TEST_F(CheckpointTest, FindSaysWhatIsThereAndWhatWasExpected) {
  Write(Path("model.safetensors"), SmallFile());
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT((*checkpoint)->Names(),
              ElementsAre("bf16", "empty", "f16", "f32", "scalar", "vector"));
  EXPECT_EQ((*checkpoint)->total_bytes(), 120);
  EXPECT_TRUE((*checkpoint)->Has("f16"));
  EXPECT_FALSE((*checkpoint)->Has("__metadata__"));
  const auto tensor = (*checkpoint)->Find("bf16", {3, 4});
  ASSERT_TRUE(tensor.ok()) << tensor.status();
  EXPECT_EQ(tensor->dtype, DType::kBFloat16);
  EXPECT_EQ(tensor->data.size(), 24u);
  EXPECT_THAT(MessageOf((*checkpoint)->Find("f32", {4, 3}).status()),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("model.safetensors"), HasSubstr("f32"),
                    HasSubstr("[3, 4]"), HasSubstr("[4, 3]")));
  EXPECT_THAT(MessageOf((*checkpoint)->Find("f32", {12}).status()), HasSubstr("[12]"));
  EXPECT_THAT(MessageOf((*checkpoint)->Find("scalar", {}).status()),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("I64"), HasSubstr("scalar")));
  EXPECT_THAT(MessageOf((*checkpoint)->Find("absent", {3, 4}).status()),
              AllOf(HasSubstr("NOT_FOUND"), HasSubstr("absent"), HasSubstr("model.safetensors")));
}

TEST_F(CheckpointTest, VectorRefusesWhatIsNotFinite) {
  Write(Path("model.safetensors"), SmallFile());
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  const auto part = (*checkpoint)->Vector("vector", 4, 0, 2);
  ASSERT_TRUE(part.ok()) << part.status();
  EXPECT_THAT(*part, ElementsAre(1.5f, -2.0f));
  EXPECT_THAT(*(*checkpoint)->Vector("vector", 4, 3, 4), ElementsAre(4.0f));
  EXPECT_THAT(MessageOf((*checkpoint)->Vector("vector", 4, 0, 4).status()),
              AllOf(HasSubstr("FAILED_PRECONDITION"), HasSubstr("vector"), HasSubstr("index 2")));
  EXPECT_FALSE((*checkpoint)->Vector("vector", 5, 0, 5).ok());
}

TEST_F(CheckpointTest, ReadsTensorsThatAreNotAligned) {
  // The header has 8 + 63 bytes, so the floats start at an odd address.
  std::string header = R"({"w":{"dtype":"F32","shape":[2],"data_offsets":[0,8]}})";
  while ((8 + header.size()) % 4 != 3) header += ' ';
  Write(Path("model.safetensors"), FileBytes(header, Bytes<float>({3.0f, -4.5f})));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(*(*checkpoint)->Vector("w", 2, 0, 2), ElementsAre(3.0f, -4.5f));
}

TEST_F(CheckpointTest, EqualsTheReferenceReaderOnEveryGoldenTensor) {
  WEFT_GOLDEN_OR_SKIP(dir, "llama_gqa");
  const Golden golden = LoadGolden(dir);
  std::filesystem::copy(dir / "golden.safetensors", Path("model.safetensors"));
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  ASSERT_EQ((*checkpoint)->Names().size(), golden.tensors.size());
  for (const auto& [name, expected] : golden.tensors) {
    const auto tensor = (*checkpoint)->Find(name, expected.shape);
    ASSERT_TRUE(tensor.ok()) << tensor.status();
    ASSERT_EQ(tensor->data.size(), expected.values.size() * sizeof(float));
    EXPECT_EQ(std::memcmp(tensor->data.data(), expected.values.data(), tensor->data.size()), 0);
  }
}

std::string OneTensor(const std::string& name, float value) {
  const json header = {{name, {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {0, 4}}}}};
  return FileBytes(header.dump(), Bytes<float>({value}));
}

TEST_F(CheckpointTest, ReadsTheShardsThatTheIndexNames) {
  Write(Path("model-1.safetensors"), OneTensor("a", 1));
  Write(Path("sub/model-2.safetensors"), OneTensor("b", 2));
  Write(Path("model-3.safetensors"), "not looked at");
  Write(Path("model.safetensors.index.json"),
        R"({"weight_map": {"a": "model-1.safetensors", "b": "sub/model-2.safetensors"}})");
  const auto checkpoint = Open();
  ASSERT_TRUE(checkpoint.ok()) << checkpoint.status();
  EXPECT_THAT(*(*checkpoint)->Vector("a", 1, 0, 1), ElementsAre(1.0f));
  EXPECT_THAT(*(*checkpoint)->Vector("b", 1, 0, 1), ElementsAre(2.0f));
}

TEST_F(CheckpointTest, AShardMayBeALinkThatLeavesTheDirectory) {
  const TempDir cache;
  Write(cache.path() / "blob", OneTensor("a", 1));
  std::filesystem::create_symlink(cache.path() / "blob", Path("model-1.safetensors"));
  Write(Path("model.safetensors.index.json"), R"({"weight_map": {"a": "model-1.safetensors"}})");
  EXPECT_TRUE(Open().ok());
}

TEST_F(CheckpointTest, RefusesAnIndexThatLies) {
  Write(Path("one.safetensors"), OneTensor("a", 1));
  Write(Path("two.safetensors"), OneTensor("b", 2));
  Write(dir_.path().parent_path() / (dir_.path().filename().string() + ".outside"),
        OneTensor("a", 1));
  const auto with = [&](const std::string& weight_map) {
    Write(Path("model.safetensors.index.json"), "{\"weight_map\": " + weight_map + "}");
    return MessageOf(Open().status());
  };
  const std::string outside = "../" + dir_.path().filename().string() + ".outside";
  EXPECT_THAT(with(R"({"a": "two.safetensors", "b": "two.safetensors"})"),
              AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("no file"), HasSubstr("index.json")));
  EXPECT_THAT(with(R"({"a": "two.safetensors", "b": "one.safetensors"})"),
              AllOf(HasSubstr("\"a\" is in two.safetensors"), HasSubstr("one.safetensors")));
  EXPECT_THAT(with(R"({"a": "one.safetensors", "c": "two.safetensors"})"),
              AllOf(HasSubstr("\"c\" is in two.safetensors"), HasSubstr("no file")));
  Write(Path("two.safetensors"), OneTensor("a", 2));
  EXPECT_THAT(with(R"({"a": "one.safetensors", "b": "two.safetensors"})"),
              AllOf(HasSubstr("tensor a is in both"), HasSubstr("two.safetensors")));
  EXPECT_THAT(with(R"({"a": "three.safetensors"})"),
              AllOf(HasSubstr("NOT_FOUND"), HasSubstr("three.safetensors")));
  for (const std::string& path : {outside, std::string("/etc/passwd"), std::string(""),
                                  std::string("a/../../x"), Path("one.safetensors").string()}) {
    EXPECT_THAT(with(json{{"a", path}}.dump()),
                AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("in the directory")))
        << path;
  }
  EXPECT_THAT(with("{}"), HasSubstr("weight_map"));
  EXPECT_THAT(with("[]"), HasSubstr("weight_map"));
  EXPECT_THAT(with(R"({"a": 3})"), HasSubstr("weight_map"));
  EXPECT_THAT(with(R"({"a": "one.safetensors", "a": "one.safetensors"})"), HasSubstr("twice"));
  std::filesystem::remove(dir_.path().parent_path() /
                          (dir_.path().filename().string() + ".outside"));
}

TEST_F(CheckpointTest, RefusesATensorThatTheIndexDoesNotName) {
  const json header = {{"a", {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {0, 4}}}},
                       {"b", {{"dtype", "F32"}, {"shape", {1}}, {"data_offsets", {4, 8}}}}};
  Write(Path("one.safetensors"), FileBytes(header.dump(), Bytes<float>({1, 2})));
  Write(Path("model.safetensors.index.json"), R"({"weight_map": {"a": "one.safetensors"}})");
  EXPECT_THAT(MessageOf(Open().status()), HasSubstr("does not name b"));
}

TEST_F(CheckpointTest, RefusesWhatIsNoRegularFileWithoutWaiting) {
  EXPECT_THAT(MessageOf(Open().status()), HasSubstr("NOT_FOUND"));
  EXPECT_THAT(MessageOf(Checkpoint::Open(Path("absent")).status()), HasSubstr("NOT_FOUND"));
  std::filesystem::create_directory(Path("model.safetensors"));
  EXPECT_THAT(MessageOf(Open().status()), HasSubstr("Is a directory"));
  std::filesystem::remove(Path("model.safetensors"));
  ASSERT_EQ(mkfifo(Path("model.safetensors").c_str(), 0600), 0);
  EXPECT_THAT(MessageOf(Open().status()), HasSubstr("INVALID_ARGUMENT"));
}

TEST_F(CheckpointTest, FingerprintsDifferBetweenCheckpointsAndNotBetweenCopies) {
  const auto fingerprint = [&](const std::string& bytes) {
    Write(Path("model.safetensors"), bytes);
    return (*Open())->fingerprint();
  };
  const std::uint64_t first = fingerprint(OneTensor("a", 1));
  EXPECT_EQ(fingerprint(OneTensor("a", 1)), first);
  EXPECT_NE(fingerprint(OneTensor("a", 2)), first);
  EXPECT_NE(fingerprint(OneTensor("b", 1)), first);
}

absl::Status Parse(const std::string& bytes) {
  return ParseSafetensorsHeader({reinterpret_cast<const std::byte*>(bytes.data()), bytes.size()},
                                "a.safetensors")
      .status();
}

TEST(SafetensorsHeaderTest, EveryProperPrefixOfAFileIsRefused) {
  const std::string file = SmallFile();
  ASSERT_TRUE(Parse(file).ok());
  for (std::size_t size = 0; size < file.size(); ++size) {
    EXPECT_FALSE(Parse(file.substr(0, size)).ok()) << size;
  }
  EXPECT_FALSE(Parse(file + "x").ok());
}

TEST(SafetensorsHeaderTest, RefusesEntriesThatDoNotDescribeTheData) {
  const auto with = [](const std::string& entry, std::size_t data_bytes = 8) {
    return MessageOf(Parse(FileBytes("{\"t\":" + entry + "}", std::string(data_bytes, 'x'))));
  };
  EXPECT_THAT(with(R"({"dtype":"F32","shape":[2],"data_offsets":[0,8]})"), HasSubstr("OK"));
  EXPECT_THAT(with(R"({"dtype":"F4","shape":[16],"data_offsets":[0,8]})"), HasSubstr("OK"));
  for (const char* bad : {
           "3",
           "[]",
           "{}",
           R"({"dtype":"F32","shape":[2]})",
           R"({"dtype":7,"shape":[2],"data_offsets":[0,8]})",
           R"({"dtype":"f32","shape":[2],"data_offsets":[0,8]})",
           R"({"dtype":"F32","shape":2,"data_offsets":[0,8]})",
           R"({"dtype":"F32","shape":[2.0],"data_offsets":[0,8]})",
           R"({"dtype":"F32","shape":["2"],"data_offsets":[0,8]})",
           R"({"dtype":"F32","shape":[-2,-1],"data_offsets":[0,8]})",
           R"({"dtype":"F32","shape":[4294967296,4294967296,4294967296],"data_offsets":[0,8]})",
           R"({"dtype":"F32","shape":[9223372036854775808],"data_offsets":[0,8]})",
           R"({"dtype":"F4","shape":[15],"data_offsets":[0,8]})",
           R"({"dtype":"F32","shape":[2],"data_offsets":[0,8,8]})",
           R"({"dtype":"F32","shape":[2],"data_offsets":[0]})",
           R"({"dtype":"F32","shape":[2],"data_offsets":{"0":8}})",
           R"({"dtype":"F32","shape":[2],"data_offsets":[8,0]})",
           R"({"dtype":"F32","shape":[2],"data_offsets":[4,12]})",
           R"({"dtype":"F32","shape":[1],"data_offsets":[0,8]})",
           R"({"dtype":"F32","shape":[2],"data_offsets":[-8,0]})",
           R"({"dtype":"F32","shape":[0],"data_offsets":[8,0]})",
           R"({"dtype":"F32","shape":[2],"data_offsets":[0,8],"shape":[2]})",
           R"({"dtype":"F32","shape":[1],"data_offsets":[4,8]})",  // a gap before it
           R"({"dtype":"F32","shape":[1],"data_offsets":[0,4]})",  // bytes after it
       }) {
    EXPECT_THAT(with(bad), AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("a.safetensors"))) << bad;
  }
}

TEST(SafetensorsHeaderTest, RefusesOverlapsAndGapsBetweenTensors) {
  const auto with = [](std::int64_t begin, std::int64_t end) {
    const json header = {
        {"a", {{"dtype", "U8"}, {"shape", {4}}, {"data_offsets", {0, 4}}}},
        {"b", {{"dtype", "U8"}, {"shape", {end - begin}}, {"data_offsets", {begin, end}}}}};
    return MessageOf(Parse(FileBytes(header.dump(), std::string(8, 'x'))));
  };
  EXPECT_THAT(with(4, 8), HasSubstr("OK"));
  EXPECT_THAT(with(3, 8), AllOf(HasSubstr("\"a\" and \"b\" share"), HasSubstr("a.safetensors")));
  EXPECT_THAT(with(0, 4), HasSubstr("share"));
  EXPECT_THAT(with(0, 8), HasSubstr("share"));
  EXPECT_THAT(with(5, 8), HasSubstr("1 bytes before tensor \"b\""));
  EXPECT_THAT(with(4, 7), HasSubstr("1 bytes after the last tensor"));
}

TEST(SafetensorsHeaderTest, RefusesHeadersThatAreNoObjectOfTensors) {
  for (const char* bad :
       {"", " {}", "[]", "{", "{}}", "{\"__metadata__\":3}", R"({"__metadata__":{"a":1}})",
        R"({"__metadata__":{},"__metadata__":{}})", "{\"a\xc0\":{}}"}) {
    EXPECT_THAT(MessageOf(Parse(FileBytes(bad, ""))),
                AllOf(HasSubstr("INVALID_ARGUMENT"), HasSubstr("a.safetensors")))
        << bad;
  }
  EXPECT_TRUE(Parse(FileBytes("{}", "")).ok());
  EXPECT_TRUE(Parse(FileBytes("{}      ", "")).ok());
}

}  // namespace
}  // namespace weft
