#pragma once

#include <cstdint>
#include <functional>
#include <iosfwd>
#include <memory>
#include <optional>
#include <string>
#include <string_view>
#include <utility>
#include <vector>

#include "absl/status/status.h"
#include "absl/time/time.h"
#include "server/base/check.h"
#include "server/exit_codes.h"

namespace weft {

// The numbers an option accepts, both ends included.
struct Range {
  template <typename A, typename B>
  constexpr Range(A min_value, B max_value) : min(min_value), max(max_value) {}
  long double min;  // holds every int64
  long double max;
};

// One table of a program's options. Each is set by its flag, else by its WEFT_ variable
// (--block-size: WEFT_BLOCK_SIZE), else by its key in the file of --config (block-size or
// block_size; a JSON object or TOML), else keeps the value its variable had when added.
// --config, --print-config, --help and --version are there by themselves.
//
//   OptionParser parser("weft-worker", "One rank of a group, or all of this host.");
//   parser.Group("Layout");
//   parser.Add("--tensor-parallel-size,-tp", &options.tensor_parallel_size, "Ranks", Range(1,
//   1024)); if (std::optional<int> exit_code = parser.Parse(argc, argv)) return *exit_code;
//
// `names` of Add: the flag first, then aliases ("-tp", "-p", "--tp"), then perhaps a name without
// dashes, which makes the option positional as well ("--model,MODEL_DIR"). Variables outlive the
// parser.
class OptionParser {
 public:
  OptionParser(std::string_view program, std::string_view description);
  ~OptionParser();
  OptionParser(const OptionParser&) = delete;
  OptionParser& operator=(const OptionParser&) = delete;

  // Heads the options that follow in --help and --print-config.
  void Group(std::string_view title);

  // T is one of
  //   std::string
  //   bool             a flag: --name, --no-name, --name=false; elsewhere true or false
  //   std::int32_t, std::int64_t, std::uint64_t, double     with a range if need be
  //   absl::Duration   "3s", "500ms", "1h30m", "inf"; never negative
  // or a std::optional of one of these, without a default: nullopt until given; or a std::vector of
  // one of these but bool: comma-separated, and the flag may be repeated.
  template <typename T>
  void Add(std::string_view names, T* value, std::string_view help,
           std::optional<Range> range = std::nullopt);
  // Texts that may hold commas: the flag is repeated, or its list in a JSON file has several.
  void AddTexts(std::string_view names, std::vector<std::string>* value, std::string_view help);
  // Bytes: "2GiB", "512MiB", "1.5GB" or a plain number; never negative. T is std::int64_t or a
  // std::optional of it.
  template <typename T>
  void AddBytes(std::string_view names, T* value, std::string_view help);
  // One of `allowed`; the variable's value must be, too.
  void AddChoice(std::string_view names, std::string* value, std::vector<std::string> allowed,
                 std::string_view help);
  template <typename E>
  void AddEnum(std::string_view names, E* value, std::vector<std::pair<std::string, E>> allowed,
               std::string_view help);

  // Sets the variables from the command line, the environment and the file. Returns nothing when
  // the program should go on, else its exit code: 0 after --help, --version and --print-config
  // (printed to `out`), kExitConfigError after one line on `err` that says which flag, variable or
  // key, what was seen, and what is allowed.
  [[nodiscard]] std::optional<int> Parse(int argc, const char* const* argv);
  [[nodiscard]] std::optional<int> Parse(int argc, const char* const* argv, std::ostream& out,
                                         std::ostream& err);

  // After Parse(): the options set by anything but their default and for which `wanted` returns
  // true, as "--name=value" arguments that set them in a child. `wanted` gets "--name".
  std::vector<std::string> Arguments(
      const std::function<bool(std::string_view name)>& wanted) const;
  // Whether there is an option `name` ("--block-size").
  bool Has(std::string_view name) const;
  // Whether `name` was given in any way.
  bool WasSet(std::string_view name) const;
  // Whether it was given on the command line.
  bool GivenAsFlag(std::string_view name) const;

 private:
  // How the table reads and writes one option's variable.
  struct Value {
    // Sets the variable (from one text, or the items of a list), or gives back the text it does
    // not take.
    std::function<std::optional<std::string>(const std::vector<std::string>& texts)> set;
    // One text (several for lists, none when unset) that `set` reads back.
    std::function<std::vector<std::string>()> show;
    std::string takes;  // for errors: "an integer from 1 to 1024"
    std::string kind;   // for --help: "INT"
    bool is_flag = false;
    bool is_list = false;
    bool splits = true;    // a list's text at its commas
    bool is_text = false;  // a string in JSON
  };
  struct Impl;

  void AddValue(std::string_view names, Value value, std::string_view help);
  void AddIndexed(std::string_view names, std::vector<std::string> allowed,
                  std::function<void(std::size_t)> set, std::function<std::size_t()> get,
                  std::string_view help);

  std::unique_ptr<Impl> impl_;
};

template <typename E>
void OptionParser::AddEnum(std::string_view names, E* value,
                           std::vector<std::pair<std::string, E>> allowed, std::string_view help) {
  std::vector<std::string> texts;
  std::vector<E> values;
  for (auto& [text, enumerator] : allowed) {
    texts.push_back(text);
    values.push_back(enumerator);
  }
  AddIndexed(
      names, std::move(texts), [value, values](std::size_t i) { *value = values[i]; },
      [value, values] {
        std::size_t i = 0;
        while (i < values.size() && values[i] != *value) ++i;
        CHECK(i < values.size());
        return i;
      },
      help);
}

}  // namespace weft
