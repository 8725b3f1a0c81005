#include "worker/model/model_config.h"

#include "fmt/format.h"
#include "server/base/status_macros.h"
#include "worker/model/config_fields.h"

namespace weft {
namespace {

using nlohmann::json;

constexpr std::int64_t kMaxFileBytes = 16 << 20;

DType ReadDType(JsonFields& fields) {
  const std::string key = fields.Has("dtype") ? "dtype" : "torch_dtype";
  std::string name = fields.String(key, "float32");
  if (name.starts_with("torch.")) name.erase(0, 6);
  const std::optional<DType> dtype = ParseDType(name);
  if (!dtype) fields.Fail(key, "it must be float32, bfloat16 or float16");
  return dtype.value_or(DType::kFloat32);
}

std::vector<std::int32_t> ReadTokenIds(JsonFields& fields, const std::string& key,
                                       std::int32_t vocab_size) {
  if (!fields.Has(key)) return {};
  const json value = fields.Raw(key).is_array() ? fields.Raw(key) : json{fields.Raw(key)};
  std::vector<std::int32_t> ids;
  for (const json& id : value) {
    if (!id.is_number_integer() || id < 0 || id >= vocab_size) {
      fields.Fail(key, fmt::format("each token id must be an integer in [0, {}), below vocab_size",
                                   vocab_size));
      return {};
    }
    ids.push_back(id.get<std::int32_t>());
  }
  return ids;
}

}  // namespace

absl::StatusOr<ModelConfig> DescribeModel(const std::filesystem::path& config_json) {
  ASSIGN_OR_RETURN(json object, ReadJsonObject(config_json, kMaxFileBytes));
  object.erase("quantization_config");
  JsonFields fields(object, config_json.string());
  ASSIGN_OR_RETURN(ModelConfig config, ReadFamily(fields));
  config.dtype = ReadDType(fields);
  RETURN_IF_ERROR(fields.status());
  return config;
}

absl::StatusOr<ModelConfig> LoadModelConfig(const std::filesystem::path& model_dir) {
  const std::filesystem::path path = model_dir / "config.json";
  ASSIGN_OR_RETURN(const json object, ReadJsonObject(path, kMaxFileBytes));
  JsonFields fields(object, path.string());
  ASSIGN_OR_RETURN(ModelConfig config, ReadFamily(fields));
  config.dtype = ReadDType(fields);
  const std::vector<std::int32_t> bos = ReadTokenIds(fields, "bos_token_id", config.vocab_size);
  if (!bos.empty()) config.bos_token_id = bos.front();
  config.eos_token_ids = ReadTokenIds(fields, "eos_token_id", config.vocab_size);
  RETURN_IF_ERROR(fields.status());

  const std::filesystem::path generation_path = model_dir / "generation_config.json";
  absl::StatusOr<json> generation = ReadJsonObject(generation_path, kMaxFileBytes);
  if (absl::IsNotFound(generation.status())) return config;
  RETURN_IF_ERROR(generation.status());
  JsonFields generation_fields(*generation, generation_path.string());
  if (generation_fields.Has("eos_token_id")) {
    config.eos_token_ids = ReadTokenIds(generation_fields, "eos_token_id", config.vocab_size);
  }
  RETURN_IF_ERROR(generation_fields.status());
  return config;
}

}  // namespace weft
