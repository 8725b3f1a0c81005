#include "tests/golden.h"

#include <cstring>
#include <fstream>
#include <iterator>
#include <stdexcept>

#include "fmt/format.h"
#include "nlohmann/json.hpp"
#include "server/base/check.h"

namespace weft {
namespace {

std::string ReadFile(const std::filesystem::path& path) {
  std::ifstream in(path, std::ios::binary);
  if (!in) throw std::runtime_error(fmt::format("cannot open {}", path.string()));
  return {std::istreambuf_iterator<char>(in), {}};
}

}  // namespace

const GoldenPrompt& Golden::Prompt(const std::string& name) const {
  const auto found = prompts.find(name);
  CHECK_MSG(found != prompts.end(), name);
  return found->second;
}

const GoldenTensor& Golden::Tensor(const std::string& name) const {
  const auto found = tensors.find(name);
  CHECK_MSG(found != tensors.end(), name);
  return found->second;
}

std::optional<std::filesystem::path> GoldenPath(std::string_view name) {
  const std::filesystem::path source = WEFT_SOURCE_DIR;
  for (const auto& folder : {source / "tests/data", source / "../shared/goldens"}) {
    if (std::filesystem::exists(folder / name)) return folder / name;
  }
  return std::nullopt;
}

std::map<std::string, GoldenTensor> ReadGoldenTensors(const std::filesystem::path& path) {
  const std::string bytes = ReadFile(path);
  std::uint64_t header_size = 0;
  std::memcpy(&header_size, bytes.data(), sizeof(header_size));
  const std::string data = bytes.substr(8 + header_size);
  std::map<std::string, GoldenTensor> tensors;
  const auto header = nlohmann::json::parse(bytes.substr(8, header_size));
  for (const auto& [name, entry] : header.items()) {
    if (name == "__metadata__") continue;
    if (entry.at("dtype") != "F32") throw std::runtime_error(name + " is not F32");
    GoldenTensor& tensor = tensors[name];
    tensor.shape = entry.at("shape").get<std::vector<std::int64_t>>();
    const auto begin = entry.at("data_offsets").at(0).get<std::size_t>();
    const auto end = entry.at("data_offsets").at(1).get<std::size_t>();
    tensor.values.resize((end - begin) / sizeof(float));
    std::memcpy(tensor.values.data(), data.substr(begin, end - begin).data(), end - begin);
  }
  return tensors;
}

Golden LoadGolden(const std::filesystem::path& dir) {
  Golden golden{.tensors = ReadGoldenTensors(dir / "golden.safetensors")};
  const auto json = nlohmann::json::parse(ReadFile(dir / "golden.json"));
  for (const auto& [name, entry] : json.at("prompts").items()) {
    GoldenPrompt& prompt = golden.prompts[name];
    prompt.ids = entry.at("ids").get<std::vector<std::int32_t>>();
    prompt.greedy = entry.at("greedy").get<std::vector<std::int32_t>>();
    prompt.margins = entry.at("margins").get<std::vector<float>>();
    if (!entry.at("first_eos_at").is_null()) {
      prompt.first_eos_at = entry.at("first_eos_at").get<std::int32_t>();
    }
  }
  return golden;
}

}  // namespace weft
