#include "server/options.h"

#include <algorithm>
#include <cstdlib>
#include <filesystem>
#include <fstream>
#include <iostream>
#include <iterator>
#include <sstream>
#include <system_error>
#include <utility>

#include "CLI/CLI.hpp"
#include "absl/status/statusor.h"
#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/base/check.h"
#include "server/base/parse_json.h"
#include "server/base/quoted.h"
#include "server/base/status_macros.h"
#include "server/option_text.h"
#include "server/version.h"

namespace weft {
namespace {

std::string EnvironmentName(std::string_view flag) {
  std::string name = "WEFT_";
  for (const char c : flag.substr(2)) {
    name += c == '-' ? '_' : static_cast<char>(std::toupper(static_cast<unsigned char>(c)));
  }
  return name;
}

// One key of a configuration file.
struct FileItem {
  std::string key;
  std::vector<std::string> texts;  // several for a list
};

absl::StatusOr<std::vector<FileItem>> ReadJson(const std::string& path, const std::string& text) {
  const absl::StatusOr<nlohmann::ordered_json> parsed = ParseJson(text);
  if (!parsed.ok()) {
    return absl::InvalidArgumentError(
        fmt::format("{}: {}", path, std::string(parsed.status().message())));
  }
  const nlohmann::ordered_json& json = *parsed;
  if (!json.is_object()) {
    return absl::InvalidArgumentError(fmt::format("{} is not a JSON object", path));
  }
  const auto as_text = [](const nlohmann::ordered_json& value) {
    return value.is_string() ? value.get<std::string>() : value.dump();
  };
  std::vector<FileItem> items;
  for (const auto& [key, value] : json.items()) {
    if (value.is_null()) continue;  // as --print-config writes what is not set
    FileItem item = {.key = key, .texts = {}};
    if (value.is_array()) {
      for (const auto& element : value) item.texts.push_back(as_text(element));
    } else {
      item.texts.push_back(as_text(value));
    }
    items.push_back(std::move(item));
  }
  return items;
}

absl::StatusOr<std::vector<FileItem>> ReadToml(const std::string& path, const std::string& text) {
  std::istringstream stream(text);
  std::vector<CLI::ConfigItem> parsed;
  try {
    parsed = CLI::ConfigTOML().from_config(stream);
  } catch (const std::exception& error) {
    return absl::InvalidArgumentError(fmt::format("{}: {}", path, error.what()));
  }
  std::vector<FileItem> items;
  for (const CLI::ConfigItem& item : parsed) {
    if (!item.parents.empty()) {
      return absl::InvalidArgumentError(
          fmt::format("{} has a section [{}]; options have no sections", path, item.parents[0]));
    }
    for (const std::string& value : item.inputs) {
      if (value.starts_with('"') || value.starts_with('\'')) {  // CLI11 cuts at # even in quotes
        return absl::InvalidArgumentError(
            fmt::format("{}: {} has an unfinished string (a string with # in it needs a JSON file)",
                        path, item.name));
      }
    }
    items.push_back({.key = item.name, .texts = item.inputs});
  }
  return items;
}

constexpr std::size_t kMaxConfigBytes = std::size_t{1} << 20;

absl::StatusOr<std::vector<FileItem>> ReadConfigFile(const std::string& path) {
  std::ifstream file(path);
  std::error_code error;
  if (!file || std::filesystem::is_directory(path, error)) {
    return absl::InvalidArgumentError(
        fmt::format("--config is {}, which cannot be read", Quoted(path)));
  }
  std::string text(kMaxConfigBytes + 1, '\0');
  text.resize(static_cast<std::size_t>(
      file.read(text.data(), static_cast<std::streamsize>(text.size())).gcount()));
  if (text.size() > kMaxConfigBytes) {
    return absl::InvalidArgumentError(
        fmt::format("--config is {}, which has more than {} bytes", Quoted(path), kMaxConfigBytes));
  }
  const std::size_t first = text.find_first_not_of(" \t\r\n");
  const bool is_json = first != std::string::npos && text[first] == '{';
  return is_json || path.ends_with(".json") ? ReadJson(path, text) : ReadToml(path, text);
}

}  // namespace

struct OptionParser::Impl {
  struct Entry {
    std::string flag;                       // "--block-size"
    std::vector<std::string> long_aliases;  // "-tp": CLI11 does not take them
    Value value;
    CLI::Option* option = nullptr;
    bool was_set = false;
  };

  CLI::App app;
  std::string program;
  std::string group = "Options";
  std::vector<Entry> entries;
  std::string config_path;
  CLI::Option* print_config = nullptr;

  Entry* Find(std::string_view flag) {
    for (Entry& entry : entries) {
      if (entry.flag == flag) return &entry;
    }
    return nullptr;
  }

  std::vector<std::string> RewriteArguments(int argc, const char* const* argv) const;
  absl::StatusOr<std::optional<std::string>> ParseArguments(int argc, const char* const* argv);
  absl::Status SetFrom(Entry& entry, const std::vector<std::string>& texts,
                       std::string_view origin);
  absl::Status Resolve();
  std::string ResolvedConfig() const;
};

// --- The table.

OptionParser::OptionParser(std::string_view program, std::string_view description)
    : impl_(std::make_unique<Impl>()) {
  impl_->program = program;
  impl_->app.name(impl_->program);
  impl_->app.description(std::string(description));
  impl_->app.allow_extras();
  impl_->app.set_version_flag("--version", fmt::format("{} {}", program, Version()),
                              "Print the version and exit");
  impl_->app.set_help_flag("-h,--help", "Print this help and exit");
  impl_->app.footer(
      "An option is taken from its flag, else from its variable (--block-size: WEFT_BLOCK_SIZE; "
      "empty is unset),\nelse from its key in the --config file (block-size).");
  impl_->print_config = impl_->app.add_flag("--print-config");
  impl_->print_config->description("Print the resolved options as JSON for --config, and exit");
  Add("--config", &impl_->config_path, "File with options, a JSON object or TOML");
}

OptionParser::~OptionParser() = default;

void OptionParser::Group(std::string_view title) { impl_->group = title; }

void OptionParser::AddValue(std::string_view names, Value value, std::string_view help) {
  Impl::Entry entry;
  std::string cli_names;
  std::string description(help);
  for (const std::string& name : SplitList(names)) {
    if (entry.flag.empty()) {
      CHECK_MSG(name.starts_with("--"), name);
      entry.flag = name;
    }
    if (name.size() > 2 && name[0] == '-' && name[1] != '-') {
      entry.long_aliases.push_back(name);
      description += fmt::format(" (also {})", name);
    } else {
      cli_names += (cli_names.empty() ? "" : ",") + name;
    }
  }
  CHECK_MSG(impl_->Find(entry.flag) == nullptr, entry.flag);
  std::string shown;
  for (const std::string& text : value.show()) shown += (shown.empty() ? "" : ",") + text;
  description += shown.empty() ? "" : fmt::format(" [{}]", shown);
  if (value.is_flag) {
    cli_names += ",!--no-" + entry.flag.substr(2);
    entry.option = impl_->app.add_flag(cli_names);
    entry.option->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
  } else {
    entry.option = impl_->app.add_option(cli_names);
    if (value.is_list) {
      entry.option->expected(1, CLI::detail::expected_max_vector_size)->allow_extra_args(false);
    } else {
      entry.option->expected(1)->multi_option_policy(CLI::MultiOptionPolicy::TakeLast);
    }
    entry.option->option_text(value.kind);
  }
  entry.option->description(description)->group(impl_->group);
  entry.value = std::move(value);
  impl_->entries.push_back(std::move(entry));
}

// --- Reading.

// "-tp 2" becomes "--tensor-parallel-size 2" and "--name=x" becomes "--name x", which CLI11 takes
// even when x is empty or begins with a dash. What follows a flag as its value stays as it is.
std::vector<std::string> OptionParser::Impl::RewriteArguments(int argc,
                                                              const char* const* argv) const {
  std::vector<std::string> result;
  bool value_follows = false;
  bool only_positional = false;
  for (int i = 1; i < argc; ++i) {
    const std::string argument = argv[i];
    if (std::exchange(value_follows, false) || only_positional || !argument.starts_with('-')) {
      result.push_back(argument);
      continue;
    }
    only_positional = argument == "--";
    const std::size_t equals = argument.find('=');
    std::string name = argument.substr(0, equals);
    const Entry* entry = nullptr;
    for (const Entry& candidate : entries) {
      const bool alias =
          std::count(candidate.long_aliases.begin(), candidate.long_aliases.end(), name) > 0;
      if (alias) name = candidate.flag;
      if (alias || candidate.option->check_name(name)) entry = &candidate;
    }
    if (entry == nullptr || entry->value.is_flag) {
      result.push_back(argument);
      continue;
    }
    result.push_back(name);
    if (equals == std::string::npos) {
      value_follows = true;
    } else {
      result.push_back(argument.substr(equals + 1));
    }
  }
  return result;
}

// A text to print instead of running the program, or nothing.
absl::StatusOr<std::optional<std::string>> OptionParser::Impl::ParseArguments(
    int argc, const char* const* argv) {
  std::vector<std::string> arguments = RewriteArguments(argc, argv);
  std::reverse(arguments.begin(), arguments.end());  // as CLI11 wants them
  try {
    app.parse(arguments);
  } catch (const CLI::CallForHelp&) {
    return app.help();
  } catch (const CLI::CallForVersion& version) {
    return std::string(version.what()) + "\n";
  } catch (const CLI::ParseError& error) {
    return absl::InvalidArgumentError(error.what());
  }
  for (const std::string& extra : app.remaining()) {
    if (extra.starts_with('-') && extra != "-" && extra != "--") {
      return absl::InvalidArgumentError(
          fmt::format("unknown option {}; --help lists them", Quoted(extra)));
    }
  }
  for (const std::string& extra : app.remaining()) {
    if (extra == "--") continue;
    return absl::InvalidArgumentError(fmt::format("unexpected argument {}", Quoted(extra)));
  }
  return std::nullopt;
}

absl::Status OptionParser::Impl::SetFrom(Entry& entry, const std::vector<std::string>& texts,
                                         std::string_view origin) {
  std::vector<std::string> parts;
  if (entry.value.is_list && entry.value.splits) {
    for (const std::string& text : texts) {
      for (std::string& part : SplitList(text)) parts.push_back(std::move(part));
    }
  } else if (entry.value.is_list || texts.size() == 1) {
    parts = texts;
  } else {
    return absl::InvalidArgumentError(
        fmt::format("{} has {} values; it takes {}", origin, texts.size(), entry.value.takes));
  }
  if (const std::optional<std::string> bad = entry.value.set(parts); bad.has_value()) {
    return absl::InvalidArgumentError(
        fmt::format("{} is {}; it takes {}", origin, Quoted(*bad), entry.value.takes));
  }
  entry.was_set = true;
  return absl::OkStatus();
}

absl::Status OptionParser::Impl::Resolve() {
  const auto set_from_program = [this](Entry& entry) -> absl::Status {
    std::vector<std::string> given = entry.option->results();
    if (!given.empty()) {
      if (!entry.value.is_list) given.erase(given.begin(), given.end() - 1);  // the last one wins
      return SetFrom(entry, given, entry.flag);
    }
    const std::string variable = EnvironmentName(entry.flag);
    const char* text = std::getenv(variable.c_str());
    if (text == nullptr || *text == '\0') return absl::OkStatus();
    return SetFrom(entry, {text}, variable);
  };
  RETURN_IF_ERROR(set_from_program(*Find("--config")));
  if (!config_path.empty()) {
    ASSIGN_OR_RETURN(const std::vector<FileItem> items, ReadConfigFile(config_path));
    for (const FileItem& item : items) {
      std::string key = item.key;
      std::replace(key.begin(), key.end(), '_', '-');
      Entry* entry = Find("--" + key);
      if (entry == nullptr || key == "config") {
        return absl::InvalidArgumentError(fmt::format(
            "{} sets {}, which is no option; --help lists them", config_path, Quoted(item.key)));
      }
      RETURN_IF_ERROR(SetFrom(*entry, item.texts, fmt::format("{} in {}", item.key, config_path)));
    }
  }
  for (Entry& entry : entries) RETURN_IF_ERROR(set_from_program(entry));
  return absl::OkStatus();
}

std::string OptionParser::Impl::ResolvedConfig() const {
  nlohmann::ordered_json config = nlohmann::ordered_json::object();
  for (const Entry& entry : entries) {
    if (entry.flag == "--config") continue;
    const auto as_json = [&entry](const std::string& text) -> nlohmann::ordered_json {
      if (entry.value.is_text) return text;
      return nlohmann::ordered_json::parse(text, nullptr, false);
    };
    const std::vector<std::string> shown = entry.value.show();
    nlohmann::ordered_json& slot = config[entry.flag.substr(2)];
    if (entry.value.is_list) {
      slot = nlohmann::ordered_json::array();
      for (const std::string& text : shown) slot.push_back(as_json(text));
    } else if (!shown.empty()) {
      slot = as_json(shown[0]);
    }
  }
  return config.dump(2, ' ', false, nlohmann::ordered_json::error_handler_t::replace) + "\n";
}

std::optional<int> OptionParser::Parse(int argc, const char* const* argv) {
  return Parse(argc, argv, std::cout, std::cerr);
}

std::optional<int> OptionParser::Parse(int argc, const char* const* argv, std::ostream& out,
                                       std::ostream& err) {
  absl::StatusOr<std::optional<std::string>> instead = impl_->ParseArguments(argc, argv);
  absl::Status status = instead.status();
  if (status.ok() && instead->has_value()) {
    out << **instead << std::flush;
    return 0;
  }
  if (status.ok()) status = impl_->Resolve();
  if (!status.ok()) {
    err << impl_->program << ": " << status.message() << std::endl;
    return kExitConfigError;
  }
  if (impl_->print_config->count() > 0) {
    out << impl_->ResolvedConfig() << std::flush;
    return 0;
  }
  return std::nullopt;
}

// --- Afterwards.

std::vector<std::string> OptionParser::Arguments(
    const std::function<bool(std::string_view name)>& wanted) const {
  std::vector<std::string> arguments;
  for (const Impl::Entry& entry : impl_->entries) {
    if (!entry.was_set || entry.flag == "--config" || !wanted(entry.flag)) continue;
    const std::vector<std::string> shown = entry.value.show();
    if (entry.value.is_list && shown.empty()) arguments.push_back(entry.flag + "=");
    for (const std::string& text : shown) arguments.push_back(entry.flag + "=" + text);
  }
  return arguments;
}

bool OptionParser::Has(std::string_view name) const { return impl_->Find(name) != nullptr; }

bool OptionParser::WasSet(std::string_view name) const {
  const Impl::Entry* entry = impl_->Find(name);
  CHECK_MSG(entry != nullptr, name);
  return entry->was_set;
}

bool OptionParser::GivenAsFlag(std::string_view name) const {
  const Impl::Entry* entry = impl_->Find(name);
  CHECK_MSG(entry != nullptr, name);
  return entry->option->count() > 0;
}

}  // namespace weft
