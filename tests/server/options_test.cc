#include "server/options.h"

#include <unistd.h>

#include <cstdlib>
#include <fstream>
#include <limits>
#include <map>
#include <sstream>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "server/option_text.h"

namespace weft {
namespace {

using ::testing::AllOf;
using ::testing::ElementsAre;
using ::testing::HasSubstr;
using ::testing::IsEmpty;
using ::testing::Not;

enum class Dtype { kAuto, kFloat32 };

struct Everything {
  std::int32_t tensor_parallel_size = 1;
  std::int64_t max_model_len = std::int64_t{1} << 60;
  std::string model;
  bool watch = true;
  double temperature = 0.1;
  absl::Duration timeout = absl::Seconds(3);
  std::int64_t pool_bytes = 1024;
  std::string format = "text";
  Dtype dtype = Dtype::kAuto;
  std::optional<std::uint64_t> seed;
  std::optional<std::int64_t> kv_bytes;
  std::vector<std::string> stop;
  std::vector<std::int32_t> ids = {1, 2};

  bool operator==(const Everything&) const = default;
};

struct Outcome {
  std::optional<int> exit_code;
  std::string out;
  std::string err;
  Everything values;
  std::vector<std::string> arguments;
};

class OptionsTest : public ::testing::Test {
 protected:
  ~OptionsTest() override {
    for (const std::string& name : variables_) unsetenv(name.c_str());
    for (const std::string& path : files_) std::remove(path.c_str());
  }

  void SetVariable(const std::string& name, const std::string& value) {
    setenv(name.c_str(), value.c_str(), 1);
    variables_.push_back(name);
  }
  std::string File(const std::string& text, const std::string& extension) {
    files_.push_back(testing::TempDir() + "/options_test_" + std::to_string(getpid()) + "_" +
                     std::to_string(files_.size()) + extension);
    std::ofstream(files_.back()) << text;
    return files_.back();
  }

  static Outcome Parse(std::vector<std::string> arguments) {
    Outcome outcome;
    Everything& v = outcome.values;
    OptionParser parser("weft-test", "A test.");
    parser.Group("Layout");
    parser.Add("--tensor-parallel-size,-tp", &v.tensor_parallel_size, "Ranks", Range(1, 1024));
    parser.Add("--max-model-len", &v.max_model_len, "Tokens");
    parser.Group("Others");
    parser.Add("--model,-m,MODEL_DIR", &v.model, "Directory");
    parser.Add("--watch", &v.watch, "A flag");
    parser.Add("--temperature", &v.temperature, "A number", Range(0, 2));
    parser.Add("--timeout", &v.timeout, "A duration");
    parser.AddBytes("--pool-bytes", &v.pool_bytes, "Bytes");
    parser.AddChoice("--format", &v.format, {"text", "json"}, "A choice");
    parser.AddEnum<Dtype>("--dtype", &v.dtype,
                          {{"auto", Dtype::kAuto}, {"float32", Dtype::kFloat32}}, "An enum");
    parser.Add("--seed", &v.seed, "No default");
    parser.AddBytes("--kv-bytes", &v.kv_bytes, "No default either");
    parser.Add("--stop", &v.stop, "A list");
    parser.Add("--ids", &v.ids, "A list of numbers", Range(0, 99));
    std::vector<const char*> argv = {"weft-test"};
    for (const std::string& argument : arguments) argv.push_back(argument.c_str());
    std::ostringstream out;
    std::ostringstream err;
    outcome.exit_code = parser.Parse(static_cast<int>(argv.size()), argv.data(), out, err);
    outcome.out = out.str();
    outcome.err = err.str();
    if (!outcome.exit_code.has_value()) {
      outcome.arguments = parser.Arguments([](std::string_view) { return true; });
    }
    return outcome;
  }
  static Everything Values(std::vector<std::string> arguments) {
    const Outcome outcome = Parse(std::move(arguments));
    EXPECT_EQ(outcome.exit_code, std::nullopt) << outcome.err;
    return outcome.values;
  }
  // The one line that refuses `arguments`, without the program's name.
  static std::string Refusal(std::vector<std::string> arguments) {
    const Outcome outcome = Parse(std::move(arguments));
    EXPECT_EQ(outcome.exit_code, kExitConfigError) << outcome.out;
    EXPECT_EQ(outcome.out, "");
    EXPECT_EQ(std::count(outcome.err.begin(), outcome.err.end(), '\n'), 1) << outcome.err;
    EXPECT_TRUE(outcome.err.starts_with("weft-test: ")) << outcome.err;
    return outcome.err.substr(11, outcome.err.size() - 12);
  }

  std::vector<std::string> variables_;
  std::vector<std::string> files_;
};

const std::vector<std::string> kAllSet = {"-tp",
                                          "4",
                                          "--max-model-len=9007199254740993",
                                          "some dir/with = and #",
                                          "--no-watch",
                                          "--temperature",
                                          "0.7",
                                          "--timeout=1500ms",
                                          "--pool-bytes",
                                          "2GiB",
                                          "--format",
                                          "json",
                                          "--dtype=float32",
                                          "--seed",
                                          "18446744073709551615",
                                          "--kv-bytes",
                                          "512MiB",
                                          "--stop",
                                          "a,b",
                                          "--stop=-c",
                                          "--ids",
                                          "7"};

Everything AllSet() {
  return {.tensor_parallel_size = 4,
          .max_model_len = 9007199254740993,
          .model = "some dir/with = and #",
          .watch = false,
          .temperature = 0.7,
          .timeout = absl::Milliseconds(1500),
          .pool_bytes = std::int64_t{2} << 30,
          .format = "json",
          .dtype = Dtype::kFloat32,
          .seed = 18446744073709551615U,
          .kv_bytes = 512 << 20,
          .stop = {"a", "b", "-c"},
          .ids = {7}};
}

TEST_F(OptionsTest, FlagsSetEveryTypeAndDefaultsStay) {
  EXPECT_EQ(Values({}), Everything());
  EXPECT_EQ(Values(kAllSet), AllSet());
}

TEST_F(OptionsTest, FlagsComeInEverySpelling) {
  EXPECT_EQ(Values({"-tp=3"}).tensor_parallel_size, 3);
  EXPECT_EQ(Values({"-m", "x"}).model, "x");
  EXPECT_EQ(Values({"--model", "x"}).model, "x");
  EXPECT_EQ(Values({"x"}).model, "x");
  EXPECT_EQ(Values({"--model", "-tp"}).model, "-tp");  // a value, not a flag
  EXPECT_EQ(Values({"--model=--watch"}).model, "--watch");
  EXPECT_EQ(Values({"--model", "--watch"}).model, "--watch");
  EXPECT_EQ(Values({"--model="}).model, "");
  EXPECT_EQ(Values({"--model=a=b"}).model, "a=b");
  EXPECT_EQ(Values({"--", "-tp"}).model, "-tp");
  EXPECT_FALSE(Values({"--watch=false"}).watch);
  EXPECT_TRUE(Values({"--no-watch", "--watch"}).watch);  // the last one wins
  EXPECT_EQ(Values({"--max-model-len", "-1"}).max_model_len, -1);
  EXPECT_EQ(Values({"-tp", "2", "-tp", "3"}).tensor_parallel_size, 3);
  EXPECT_THAT(Values({"--ids="}).ids, IsEmpty());
}

TEST_F(OptionsTest, AFlagBeatsTheEnvironmentWhichBeatsTheFile) {
  for (const std::string extension : {".json", ".toml"}) {
    const std::string path =
        extension == ".json"
            ? File(R"({"tensor-parallel-size": 2, "max_model_len": 20, "format": "json"})",
                   extension)
            : File("tensor-parallel-size = 2 # comment\nmax_model_len=20\nformat = \"json\"\n",
                   extension);
    Everything v = Values({"--config", path});
    EXPECT_EQ(std::tie(v.tensor_parallel_size, v.max_model_len, v.format),
              std::make_tuple(2, 20, "json"));
    SetVariable("WEFT_TENSOR_PARALLEL_SIZE", "3");
    SetVariable("WEFT_MAX_MODEL_LEN", "30");
    SetVariable("WEFT_STOP", "x,y");
    v = Values({"--config", path, "--max-model-len=40"});
    EXPECT_EQ(std::tie(v.tensor_parallel_size, v.max_model_len, v.format),
              std::make_tuple(3, 40, "json"));
    EXPECT_THAT(v.stop, ElementsAre("x", "y"));
    SetVariable("WEFT_TENSOR_PARALLEL_SIZE", "");  // empty is unset
    SetVariable("WEFT_CONFIG", path);
    EXPECT_EQ(Values({}).tensor_parallel_size, 2);
    for (const std::string& name : variables_) unsetenv(name.c_str());
  }
}

TEST_F(OptionsTest, PrintedConfigAndPassedArgumentsReadBackTheSame) {
  std::vector<std::string> print = kAllSet;
  print.push_back("--print-config");
  const Outcome printed = Parse(print);
  EXPECT_EQ(printed.exit_code, 0);
  EXPECT_EQ(Values({"--config", File(printed.out, ".json")}), AllSet());
  EXPECT_EQ(Values(Parse(kAllSet).arguments), AllSet());
  // Defaults too, and nothing of them is passed on.
  EXPECT_EQ(Values({"--config", File(Parse({"--print-config"}).out, ".json")}), Everything());
  EXPECT_THAT(Parse({}).arguments, IsEmpty());
  EXPECT_THAT(Parse({"-tp", "1", "--ids="}).arguments,
              ElementsAre("--tensor-parallel-size=1", "--ids="));
}

TEST_F(OptionsTest, AFileOfTomlSetsEveryType) {
  EXPECT_EQ(Values({"--config", File(R"(# all
tensor-parallel-size = 4
max-model-len = 9007199254740993
model = "some dir/with = and "
watch = false
temperature = 0.7
timeout = "1500ms"
pool-bytes = 2GiB
format = 'json'
dtype = "float32"
seed = 18446744073709551615
kv-bytes = 536870912
stop = ["a", "b", "-c"]
ids = [7]
)",
                                     ".toml")})
                .ids,
            std::vector<std::int32_t>{7});
}

TEST_F(OptionsTest, ABadValueIsRefusedSayingWhereWhatAndWhatIsAllowed) {
  EXPECT_EQ(Refusal({"-tp", "0"}),
            "--tensor-parallel-size is \"0\"; it takes an integer from 1 to 1024");
  EXPECT_EQ(Values({"-tp", "1024"}).tensor_parallel_size, 1024);
  EXPECT_EQ(Refusal({"-tp", "1025"}),
            "--tensor-parallel-size is \"1025\"; it takes an integer from 1 to 1024");
  for (const char* bad : {"", "x", "1.0", "1 ", " 1", "0x1", "99999999999999999999"}) {
    EXPECT_THAT(Refusal({"-tp", bad}), HasSubstr("an integer from 1 to 1024")) << bad;
  }
  for (const char* bad : {"nan", "inf", "2.01", "-0.1", "1,0"}) {
    EXPECT_EQ(Refusal({"--temperature", bad}),
              "--temperature is \"" + std::string(bad) + "\"; it takes a number from 0 to 2");
  }
  EXPECT_THAT(Refusal({"--watch=maybe"}), HasSubstr("true or false"));
  EXPECT_THAT(Refusal({"--timeout", "3"}), HasSubstr("a duration such as"));
  EXPECT_THAT(Refusal({"--timeout=-3s"}), HasSubstr("a duration such as"));
  EXPECT_THAT(Refusal({"--pool-bytes", "2G"}), HasSubstr("GiB"));
  EXPECT_THAT(Refusal({"--seed", "18446744073709551616"}), HasSubstr("an integer"));
  EXPECT_THAT(Refusal({"--seed", "-1"}), HasSubstr("an integer"));
  EXPECT_EQ(Refusal({"--format", "xml"}), "--format is \"xml\"; it takes one of text|json");
  EXPECT_EQ(Refusal({"--dtype", "int8"}), "--dtype is \"int8\"; it takes one of auto|float32");
  EXPECT_EQ(Refusal({"--ids", "1,100"}), "--ids is \"100\"; it takes an integer from 0 to 99");
  EXPECT_THAT(Refusal({"--format", std::string("a\nb") + std::string(500, 'x')}),
              AllOf(HasSubstr("\"a?b"), HasSubstr("...\"")));
  SetVariable("WEFT_TENSOR_PARALLEL_SIZE", "two");
  EXPECT_EQ(Refusal({}),
            "WEFT_TENSOR_PARALLEL_SIZE is \"two\"; it takes an integer from 1 to 1024");
}

TEST_F(OptionsTest, WhatIsNoOptionIsRefused) {
  EXPECT_THAT(Refusal({"--tensor-paralel-size", "2"}), HasSubstr("\"--tensor-paralel-size\""));
  EXPECT_THAT(Refusal({"-x"}), HasSubstr("\"-x\""));
  EXPECT_THAT(Refusal({"model", "second"}), HasSubstr("unexpected argument \"second\""));
  EXPECT_THAT(Refusal({"--format"}), HasSubstr("--format"));
  EXPECT_THAT(Refusal({"-tp"}), HasSubstr("--tensor-parallel-size"));
}

TEST_F(OptionsTest, ABadFileIsRefused) {
  EXPECT_THAT(Refusal({"--config", "/nonexistent"}), HasSubstr("\"/nonexistent\""));
  EXPECT_THAT(Refusal({"--config", testing::TempDir()}), HasSubstr("cannot be read"));
  const std::map<std::string, std::string> json = {
      {R"({"tensor-paralel-size": 2})", "\"tensor-paralel-size\", which is no option"},
      {R"({"config": "x"})", "no option"},
      {R"({"tensor-parallel-size": "x"})", "tensor-parallel-size in "},
      {R"({"tensor-parallel-size": [1, 2]})", "has 2 values"},
      {R"({"tensor-parallel-size": {"a": 1}})", "an integer from 1 to 1024"},
      {R"({"ids": [1, "x"]})", "is \"x\""},
      {"[1]", "not a JSON object"},
      {"{", "not JSON: parse error at line 1, column 2"},
      {"{\"tensor-parallel-size\": " + std::string(100000, '[') + std::string(100000, ']') + "}",
       "nests deeper"},
  };
  for (const auto& [text, message] : json) {
    EXPECT_THAT(Refusal({"--config", File(text, ".json")}), HasSubstr(message)) << text;
  }
  const std::map<std::string, std::string> toml = {
      {"tensor-paralel-size = 2", "no option"},
      {"[layout]\ntensor-parallel-size = 2", "section"},
      {"a.b = 2", "section"},
      {"tensor-parallel-size = x", "an integer from 1 to 1024"},
      {"tensor-parallel-size = [1, 2]", "has 2 values"},
      {"tensor-parallel-size =", "an integer from 1 to 1024"},
      {"model = \"a # b\"", "unfinished string"},
      {"tensor-parallel-size: 2", "no option"},
  };
  for (const auto& [text, message] : toml) {
    EXPECT_THAT(Refusal({"--config", File(text, ".toml")}), HasSubstr(message)) << text;
  }
}

TEST_F(OptionsTest, HelpIsGroupedAndNamesDefaultsAndAliases) {
  const Outcome help = Parse({"--help"});
  EXPECT_EQ(help.exit_code, 0);
  EXPECT_EQ(help.err, "");
  EXPECT_LT(help.out.find("Layout:"), help.out.find("--tensor-parallel-size"));
  EXPECT_LT(help.out.find("--max-model-len"), help.out.find("Others:"));
  EXPECT_THAT(help.out, AllOf(HasSubstr("(also -tp)"), HasSubstr("[3s]"), HasSubstr("text|json"),
                              HasSubstr("WEFT_BLOCK_SIZE"), HasSubstr("--print-config")));
  EXPECT_EQ(Parse({"--version"}).out.find("weft-test "), 0);
  EXPECT_EQ(Parse({"--version"}).exit_code, 0);
}

TEST(OptionTextTest, Bytes) {
  EXPECT_EQ(ParseBytes("0"), 0);
  EXPECT_EQ(ParseBytes("9223372036854775807"), std::numeric_limits<std::int64_t>::max());
  EXPECT_EQ(ParseBytes("9007199254740993"), 9007199254740993);
  EXPECT_EQ(ParseBytes("1KiB"), 1024);
  EXPECT_EQ(ParseBytes("1.5kib"), 1536);
  EXPECT_EQ(ParseBytes("3MB"), 3000000);
  EXPECT_EQ(ParseBytes("2TiB"), std::int64_t{2} << 40);
  for (const char* bad : {"", "-1", "-1KiB", "1.5", "KiB", "1 KiB", "1K", "1e3", "nan", "inf",
                          "9223372036854775808", "8388608TiB"}) {
    EXPECT_EQ(ParseBytes(bad), std::nullopt) << bad;
  }
}

}  // namespace
}  // namespace weft
