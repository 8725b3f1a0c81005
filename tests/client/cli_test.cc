// The programs weft and weft-router as users run them, with a stand-in for weft-worker.

#include <fcntl.h>
#include <signal.h>
#include <spawn.h>
#include <sys/wait.h>
#include <unistd.h>

#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <sstream>
#include <string>
#include <utility>
#include <vector>

#include "absl/time/clock.h"
#include "absl/time/time.h"
#include "fmt/format.h"
#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "server/base/check.h"
#include "server/exit_codes.h"
#include "tests/temp_dir.h"

extern char** environ;

namespace weft {
namespace {

using ::testing::HasSubstr;
using ::testing::Not;
using ::testing::StartsWith;
using Json = nlohmann::json;
namespace fs = std::filesystem;

std::string ReadFile(const fs::path& path) {
  std::ifstream file(path);
  std::ostringstream text;
  text << file.rdbuf();
  return text.str();
}

std::vector<std::string> Lines(const std::string& text) {
  std::vector<std::string> lines;
  std::istringstream stream(text);
  for (std::string line; std::getline(stream, line);) lines.push_back(line);
  return lines;
}

// One run of a program; its output goes to files.
class Program {
 public:
  Program(std::vector<std::string> arguments, const fs::path& output, const std::string& out_file)
      : out_(out_file.empty() ? output.string() + ".out" : out_file),
        err_(output.string() + ".err") {
    posix_spawn_file_actions_t actions;
    posix_spawn_file_actions_init(&actions);
    const int flags = O_WRONLY | O_CREAT | O_TRUNC;
    posix_spawn_file_actions_addopen(&actions, 0, "/dev/null", O_RDONLY, 0);
    posix_spawn_file_actions_addopen(&actions, 1, out_.c_str(), flags, 0600);
    posix_spawn_file_actions_addopen(&actions, 2, err_.c_str(), flags, 0600);
    std::vector<char*> argv;
    for (std::string& argument : arguments) argv.push_back(argument.data());
    argv.push_back(nullptr);
    CHECK(posix_spawn(&pid_, argv[0], &actions, nullptr, argv.data(), environ) == 0);
    posix_spawn_file_actions_destroy(&actions);
  }
  ~Program() {
    if (pid_ == 0) return;
    kill(pid_, SIGKILL);
    Wait();
  }

  void Signal(int signal) const { kill(pid_, signal); }
  // The exit code, or minus the signal that ended it.
  int Wait() {
    int status = 0;
    CHECK(waitpid(pid_, &status, 0) == pid_);
    pid_ = 0;
    return WIFEXITED(status) ? WEXITSTATUS(status) : -WTERMSIG(status);
  }
  std::string Out() const { return ReadFile(out_); }
  std::string Err() const { return ReadFile(err_); }
  void WaitForOut(std::string_view text) const { WaitFor(out_, text); }
  void WaitForErr(std::string_view text) const { WaitFor(err_, text); }

 private:
  static void WaitFor(const fs::path& path, std::string_view text) {
    while (ReadFile(path).find(text) == std::string::npos) absl::SleepFor(absl::Milliseconds(10));
  }

  const fs::path out_;
  const fs::path err_;
  pid_t pid_ = 0;
};

class CliTest : public ::testing::Test {
 protected:
  // A directory of our own holds the programs, so that weft finds the stand-in beside itself.
  void SetUp() override {
    const char* bin = std::getenv("WEFT_BIN_DIR");
    ASSERT_NE(bin, nullptr) << "WEFT_BIN_DIR names the folder of the programs";
    for (const auto& [from, to] : {std::pair{"weft", "weft"},
                                   {"weft-router", "weft-router"},
                                   {"fake_leader", "weft-worker"}}) {
      // A link would lead weft back to the folder of the real weft-worker.
      fs::copy_file(fs::path(bin) / from, dir_.path() / to);
    }
  }

  // Nothing of ours may be left: every process has our folder in its command line.
  void TearDown() override {
    while (NumProcesses() > 0) absl::SleepFor(absl::Milliseconds(10));
  }

  int NumProcesses() const {
    int count = 0;
    for (const auto& entry : fs::directory_iterator("/proc")) {
      std::error_code gone;
      const fs::path exe = fs::read_symlink(entry.path() / "exe", gone);
      if (!gone && exe.string().starts_with(dir_.path().string())) ++count;
    }
    return count;
  }

  // Standard output goes to `out_file` if there is one.
  std::unique_ptr<Program> Start(std::vector<std::string> arguments,
                                 const std::string& out_file = "") {
    arguments.insert(arguments.begin(), (dir_.path() / "weft").string());
    return std::make_unique<Program>(std::move(arguments),
                                     dir_.path() / fmt::format("run{}", next_run_++), out_file);
  }

  // `weft generate` with processes of its own.
  std::unique_ptr<Program> Generate(std::vector<std::string> arguments) {
    const std::vector<std::string> common = {"generate", "--model=any", "--skip-tokenizer-init"};
    arguments.insert(arguments.begin(), common.begin(), common.end());
    return Start(std::move(arguments));
  }

  std::string WriteFile(std::string_view name, std::string_view contents) {
    const fs::path path = dir_.path() / name;
    std::ofstream(path) << contents;
    return path.string();
  }

  TempDir dir_;
  int next_run_ = 0;
};

TEST_F(CliTest, BadCommandLinesAreOneLineAndAConfigurationError) {
  const std::string large = WriteFile("large.jsonl", "");
  std::filesystem::resize_file(large, (std::uintmax_t{1} << 30) + 1);  // a hole
  const std::vector<std::pair<std::vector<std::string>, std::string>> cases = {
      {{"fly"}, "there is no command \"fly\""},
      {{"serve"}, "no model"},
      {{"serve", "m", "--port=70000"}, "--port"},
      {{"serve", "m", "-tp", "3", "-dcp", "2"}, "--decode-context-parallel-size is 2"},
      {{"serve", "m", "--prefill-context-parallel-size=2"}, "only 1 is supported"},
      {{"serve", "m", "--speculative-config={}"}, "--speculative-config: "},
      {{"serve", "m", "--max-model-len=huge"}, "--max-model-len is \"huge\""},
      {{"serve", "m", "--dtype=int3"}, "--dtype"},
      {{"serve", "m", "--no-such-flag"}, "--no-such-flag"},
      {{"generate", "m"}, "exactly one of --prompt"},
      {{"generate", "m", "--prompt=a", "--prompt-token-ids=1"}, "exactly one of --prompt"},
      {{"generate", "--prompt=a"}, "no model"},
      {{"generate", "m", "--prompt-token-ids=1,x"}, "\"x\" is not a token id"},
      {{"generate", "m", "--prompts-file=/nowhere.jsonl"}, "/nowhere.jsonl: cannot be read"},
      {{"generate", "m", "--prompts-file=" + WriteFile("bad.jsonl", "{}")}, "bad.jsonl:1: "},
      {{"generate", "m", "--prompts-file=" + WriteFile("none.jsonl", "\n")}, "no prompt in it"},
      {{"generate", "m", "--prompts-file=/proc"}, "/proc: is a directory"},
      {{"generate", "m", "--prompt=a", "--max-tokens=x"}, "--max-tokens"},
      {{"generate", "--address=x:1", "--prompt=a", "-tp", "2"}, "--tensor-parallel-size is for"},
      {{"generate", "m", "--address=x:1", "--prompt=a"}, "--model is for processes of our own"},
      {{"bench", "--address=x:1", "--skip-tokenizer-init"}, "--skip-tokenizer-init is for"},
      {{"bench", "m", "--request-rate=0"}, "--request-rate"},
      {{"bench", "m", "--dataset=agentic", "--request-rate=1"}, "--request-rate does not go with"},
      {{"bench", "m", "--agentic-turns=0"}, "--agentic-turns"},
      {{"bench", "m", "--random-range-ratio=1.5"}, "--random-range-ratio"},
      {{"bench", "m", "--random-input-len=2684355"}, "times --random-input-len are 268435500 "},
      {{"bench", "m", "--prompts-file=/nowhere.jsonl"}, "/nowhere.jsonl: cannot be read"},
      {{"bench", "m", "--prompts-file=" + large}, "large.jsonl: has 1073741825 bytes; at most"},
  };
  for (const auto& [arguments, message] : cases) {
    const auto program = Start(arguments);
    EXPECT_EQ(program->Wait(), kExitConfigError) << message;
    EXPECT_EQ(Lines(program->Err()).size(), 1U) << program->Err();
    EXPECT_THAT(program->Err(), HasSubstr(message));
    EXPECT_EQ(program->Out(), "");
  }
}

TEST_F(CliTest, JsonLinesComeInTheOrderOfThePrompts) {
  std::string file;
  for (int i = 0; i < 8; ++i) {
    file += fmt::format("{{\"prompt_token_ids\": [{}], \"max_tokens\": {}}}\n", 10 * i + 10, 9 - i);
  }
  const auto program = Generate(
      {"--prompts-file=" + WriteFile("p.jsonl", file), "--format=json", "--concurrency=3"});
  ASSERT_EQ(program->Wait(), 0) << program->Err();
  const std::vector<std::string> lines = Lines(program->Out());
  ASSERT_EQ(lines.size(), 8U);
  for (int i = 0; i < 8; ++i) {
    const Json line = Json::parse(lines[i]);
    std::vector<int> wanted;
    for (int t = 1; t <= 9 - i; ++t) wanted.push_back(10 * i + 10 + t);
    EXPECT_EQ(line["index"], i);
    EXPECT_EQ(line["prompt_token_ids"], Json({10 * i + 10}));
    EXPECT_EQ(line["token_ids"], Json(wanted));
    EXPECT_EQ(line["finish_reason"], "length");
    EXPECT_EQ(line["usage"]["total_tokens"], 1 + 9 - i);
  }
}

TEST_F(CliTest, OneFailedRequestLeavesTheOthersAndShowsInTheExitCode) {
  const std::string file = WriteFile("p.jsonl",
                                     "{\"prompt_token_ids\": [10], \"max_tokens\": 1}\n"
                                     "{\"prompt_token_ids\": [1], \"max_tokens\": 1}\n"
                                     "{\"prompt_token_ids\": [10], \"top_p\": 2}\n"
                                     "{\"prompt_token_ids\": [20], \"max_tokens\": 1}\n");
  const auto program = Generate({"--prompts-file=" + file, "--format=json"});
  EXPECT_EQ(program->Wait(), 1);
  const std::vector<std::string> lines = Lines(program->Out());
  ASSERT_EQ(lines.size(), 4U);
  EXPECT_EQ(Json::parse(lines[0])["token_ids"], Json({11}));
  EXPECT_EQ(Json::parse(lines[1]), Json({{"index", 1},
                                         {"error",
                                          {{"code", "RESOURCE_EXHAUSTED"},
                                           {"reason", "OUT_OF_LIMITS"},
                                           {"message", "too much"}}}}));
  EXPECT_EQ(Json::parse(lines[2])["error"]["code"], "INVALID_ARGUMENT");
  EXPECT_EQ(Json::parse(lines[3])["token_ids"], Json({21}));
}

TEST_F(CliTest, ABrokenModelIsOneLineAndNoRestart) {
  const auto program =
      Start({"generate", "--model=broken", "--skip-tokenizer-init", "--prompt-token-ids=5"});
  EXPECT_EQ(program->Wait(), kExitConfigError);
  EXPECT_THAT(program->Err(), StartsWith("fake-leader: broken is broken"));
  EXPECT_EQ(program->Out(), "");
  const auto serve =
      Start({"serve", "broken", "--skip-tokenizer-init", "--port=0", "--metrics-port=0"});
  EXPECT_EQ(serve->Wait(), kExitConfigError);
}

TEST_F(CliTest, NothingIsLeftAfterAnInterruptOrAKill) {
  for (const int signal : {SIGINT, SIGTERM, SIGKILL}) {
    const auto program = Generate({"--prompt-token-ids=2"});
    program->WaitForErr("sharded by position");  // the request is on its way
    program->Signal(signal);
    EXPECT_EQ(program->Wait(), signal == SIGKILL ? -SIGKILL : 128 + signal);
    EXPECT_EQ(program->Out(), "");
    while (NumProcesses() > 0) absl::SleepFor(absl::Milliseconds(10));
  }
}

TEST_F(CliTest, ServeFinishesWhatIsInFlight) {
  const std::string address = fmt::format("unix-abstract:weft-cli-test-{}", getpid());
  const auto serve =
      Start({"serve", "any", "--skip-tokenizer-init", "--listen=" + address, "--metrics-port=0",
             "-tp", "4", "-dcp", "2", "--block-size=128", "--served-model-name=tiny"});
  serve->WaitForErr("tiny is ready on 4 ranks");

  const auto status = Start({"status", "--address=" + address, "--format=json"});
  ASSERT_EQ(status->Wait(), 0) << status->Err();
  const Json info = Json::parse(status->Out());
  EXPECT_EQ(info["groups"][0]["tensor_parallel_size"], 4);
  EXPECT_EQ(info["groups"][0]["decode_context_parallel_size"], 2);
  EXPECT_EQ(info["groups"][0]["block_size"], 128);
  EXPECT_EQ(info["groups"][0]["model"], "tiny");
  EXPECT_EQ(info["groups"][0]["num_requests_running"], 0);  // zero is printed, too
  const auto table = Start({"status", "--address=" + address});
  ASSERT_EQ(table->Wait(), 0) << table->Err();
  EXPECT_THAT(table->Out(), HasSubstr("4 ranks, KV cache sharded by position over 2"));

  const auto wrong_model = Start({"generate", "--address=" + address, "--prompt-token-ids=100",
                                  "--served-model-name=huge", "--format=json"});
  EXPECT_EQ(wrong_model->Wait(), 1);
  EXPECT_THAT(wrong_model->Out(), HasSubstr("\\\"tiny\\\" is served here"));

  const std::string prompts = WriteFile("p.jsonl",
                                        "{\"prompt_token_ids\": [3], \"max_tokens\": 1}\n"
                                        "{\"prompt_token_ids\": [100], \"max_tokens\": 100}\n");
  const auto generate =
      Start({"generate", "--address=" + address, "--prompts-file=" + prompts, "--format=json"});
  generate->WaitForOut("\"index\":0");  // the second one is under way for a second
  serve->Signal(SIGTERM);
  EXPECT_EQ(generate->Wait(), 0) << generate->Out() << generate->Err();
  EXPECT_EQ(Json::parse(Lines(generate->Out())[1])["token_ids"].size(), 100U);
  EXPECT_EQ(serve->Wait(), 0) << serve->Err();
}

TEST_F(CliTest, AModelDirectoryThatIsNotThereIsNamed) {
  const std::string file = WriteFile("file", "");
  for (const auto& [model, message] :
       {std::pair<std::string, std::string>{"/no/such/model",
                                            "/no/such/model: there is no such directory"},
        {file, file + ": is a file; the directory of the model is wanted"}}) {
    const auto program = Start({"generate", "--model=" + model, "--prompt=x"});
    EXPECT_EQ(program->Wait(), kExitConfigError);
    EXPECT_EQ(Lines(program->Err()).size(), 1U) << program->Err();
    EXPECT_THAT(program->Err(), HasSubstr(message));
  }
}

TEST_F(CliTest, OutputThatCannotBeWrittenIsAnError) {
  for (const std::vector<std::string>& arguments :
       {std::vector<std::string>{"generate", "--model=any", "--skip-tokenizer-init",
                                 "--prompt-token-ids=5", "--format=json"},
        {"generate", "--help"},
        {"--version"}}) {
    const auto program = Start(arguments, "/dev/full");
    EXPECT_EQ(program->Wait(), 1);
    EXPECT_THAT(program->Err(), HasSubstr("weft: standard output: "));
  }
}

TEST_F(CliTest, ALowLimitOfOpenFilesIsOneLine) {
  for (const int limit : {20, 63, 100}) {  // too low for a client, twice, and for a router
    const std::string command = fmt::format(
        "ulimit -n {}; exec {} generate --model={} --prompt-token-ids=5 --skip-tokenizer-init",
        limit, (dir_.path() / "weft").string(), dir_.path().string());
    Program program({"/bin/sh", "-c", command}, dir_.path() / "limited", "");
    EXPECT_EQ(program.Wait(), kExitConfigError);
    EXPECT_EQ(Lines(program.Err()).size(), 1U) << program.Err();
    EXPECT_THAT(program.Err(),
                HasSubstr(fmt::format("the limit of open files is {}; at least", limit)));
  }
}

TEST_F(CliTest, LibrariesDoNotWriteToStandardError) {
  const auto program = Generate({"--prompt=\xff", "--format=json"});
  EXPECT_EQ(program->Wait(), 1);
  EXPECT_THAT(program->Out(), HasSubstr("INVALID_ARGUMENT"));
  EXPECT_THAT(program->Err(), Not(HasSubstr("libprotobuf")));
}

TEST_F(CliTest, BenchPrintsTheTableOfWhatItMeasured) {
  const std::vector<std::string> load = {
      "bench",          "--model=any",          "--skip-tokenizer-init", "--num-prompts=6",
      "--seed=3",       "--random-input-len=8", "--random-output-len=5", "--max-concurrency=3",
      "--num-warmups=0"};
  const auto table = Start(load);
  ASSERT_EQ(table->Wait(), 0) << table->Err();
  for (const char* line : {"============ Serving Benchmark Result ============",
                           "Successful requests:                     6 ",
                           "Failed requests:                         0 ",
                           "Maximum request concurrency:             3 ",
                           "Total input tokens:                      48 ",
                           "Total generated tokens:                  30 ", "P99 ITL (ms):"}) {
    EXPECT_THAT(table->Out(), HasSubstr(line));
  }
  // Open loop, from a file, with one that fails: the answer to token 1.
  const std::string prompts = WriteFile("p.jsonl",
                                        "{\"prompt_token_ids\": [10], \"max_tokens\": 4}\n"
                                        "{\"prompt_token_ids\": [1], \"max_tokens\": 4}\n");
  const auto json = Start({"bench", "--model=any", "--skip-tokenizer-init", "--num-prompts=6",
                           "--prompts-file=" + prompts, "--request-rate=100", "--format=json"});
  EXPECT_EQ(json->Wait(), 1);
  EXPECT_THAT(json->Err(), HasSubstr("3 of 6 requests failed; the first: too much"));
  const Json result = Json::parse(json->Out());
  EXPECT_EQ(result["completed"], 3);
  EXPECT_EQ(result["failed"], 3);
  EXPECT_EQ(result["total_input_tokens"], 3);
  EXPECT_EQ(result["total_output_tokens"], 12);
  EXPECT_EQ(result["request_rate"], 100);
  EXPECT_GT(result["p99_e2el_ms"], result["mean_ttft_ms"]);
}

TEST_F(CliTest, AgenticSessionsSendEverythingThatWasSaid) {
  const auto bench =
      Start({"bench", "--model=any", "--skip-tokenizer-init", "--dataset=agentic",
             "--agentic-sessions=3", "--agentic-turns=2", "--agentic-prefix-len=10",
             "--agentic-turn-len=5", "--agentic-output-len=4", "--seed=3", "--format=json"});
  ASSERT_EQ(bench->Wait(), 0) << bench->Err();
  const Json result = Json::parse(bench->Out());
  EXPECT_EQ(result["completed"], 6);
  EXPECT_EQ(result["total_input_tokens"], 3 * (15 + 24));
  EXPECT_EQ(result["total_output_tokens"], 6 * 4);
}

TEST_F(CliTest, ClientsSayWhenNobodyListens) {
  const std::string nowhere = "--address=unix-abstract:weft-cli-test-nobody";
  const auto status = Start({"status", nowhere});
  EXPECT_EQ(status->Wait(), 1);
  EXPECT_EQ(Lines(status->Err()).size(), 1U) << status->Err();
  const auto generate = Start({"generate", nowhere, "--prompt-token-ids=5", "--format=json"});
  EXPECT_EQ(generate->Wait(), 1);
  EXPECT_EQ(Json::parse(generate->Out())["error"]["code"], "UNAVAILABLE");
}

}  // namespace
}  // namespace weft
