#include <optional>

#include "fmt/format.h"
#include "server/base/status_macros.h"
#include "worker/model/config_fields.h"

namespace weft {
namespace {

using nlohmann::json;

constexpr double kMaxFactor = 1e6;

constexpr std::string_view kRopeKeys[] = {"type",
                                          "rope_type",
                                          "rope_theta",
                                          "factor",
                                          "low_freq_factor",
                                          "high_freq_factor",
                                          "beta_fast",
                                          "beta_slow",
                                          "attention_factor",
                                          "mscale",
                                          "mscale_all_dim",
                                          "truncate",
                                          "finetuned",
                                          "original_max_position_embeddings",
                                          "partial_rotary_factor"};

// What is in an object about rotary embeddings changes the result, so an unknown key is an error.
void CheckRopeKeys(const json& object, JsonFields& fields) {
  for (const auto& item : object.items()) {
    if (item.value().is_null()) continue;
    bool known = false;
    for (std::string_view key : kRopeKeys) known = known || key == item.key();
    if (!known) fields.Fail(item.key(), "such a key is not supported here");
  }
  if (fields.Has("partial_rotary_factor") && fields.Raw("partial_rotary_factor") != 1) {
    fields.Fail("partial_rotary_factor", "only 1 is supported");
  }
}

RopeType ReadRopeType(JsonFields& fields) {
  const std::string key = fields.Has("rope_type") || !fields.Has("type") ? "rope_type" : "type";
  const std::string type = fields.String(key, "default");
  if (type == "default") return RopeType::kDefault;
  if (type == "linear") return RopeType::kLinear;
  if (type == "llama3") return RopeType::kLlama3;
  if (type == "yarn") return RopeType::kYarn;
  fields.Fail(key, fmt::format("{}it must be one of default, linear, llama3, yarn",
                               key == "type" ? "as rope_type " : ""));
  return RopeType::kDefault;
}

// Only the keys that the type reads are looked at, as in the reference.
void ReadRopeScaling(JsonFields& fields, std::int64_t max_position_embeddings, RopeConfig& rope) {
  rope.type = ReadRopeType(fields);
  if (rope.type == RopeType::kDefault) return;
  rope.factor = fields.Real("factor", 1e-6, kMaxFactor);
  rope.mscale_all_dim = fields.Real("mscale_all_dim", 0, kMaxFactor, 0);  // MLA, with any type
  if (rope.type == RopeType::kLinear) return;
  rope.original_max_position_embeddings =
      fields.Int("original_max_position_embeddings", 1, kMaxPositions,
                 rope.original_max_position_embeddings > 0 ? rope.original_max_position_embeddings
                                                           : max_position_embeddings);
  if (rope.type == RopeType::kLlama3) {
    rope.low_freq_factor = fields.Real("low_freq_factor", 1e-6, kMaxFactor);
    rope.high_freq_factor = fields.Real("high_freq_factor", 1e-6, kMaxFactor);
    if (rope.high_freq_factor <= rope.low_freq_factor) {
      fields.Fail("high_freq_factor",
                  fmt::format("it must be above low_freq_factor, {}", rope.low_freq_factor));
    }
    return;
  }
  rope.beta_fast = fields.Real("beta_fast", 1e-6, kMaxFactor, rope.beta_fast);
  rope.beta_slow = fields.Real("beta_slow", 1e-6, kMaxFactor, rope.beta_slow);
  rope.mscale = fields.Real("mscale", 0, kMaxFactor, 0);
  rope.truncate = fields.Bool("truncate", true);
  if (fields.Has("attention_factor")) {
    rope.attention_factor = fields.Real("attention_factor", 1e-6, kMaxFactor);
  }
}

}  // namespace

// Both layouts: `rope_parameters` with everything in it, or `rope_theta` beside `rope_scaling`.
absl::StatusOr<RopeConfig> ReadRope(JsonFields& fields, std::int64_t max_position_embeddings,
                                    double default_theta) {
  const std::string inner_length = "original_max_position_embeddings";
  RopeConfig outer;
  outer.theta = fields.Real("rope_theta", 1 + 1e-6, 1e12, default_theta);
  outer.original_max_position_embeddings = fields.Int(inner_length, 1, kMaxPositions, 0);
  RETURN_IF_ERROR(fields.status());
  std::optional<RopeConfig> rope;
  for (const std::string key : {"rope_parameters", "rope_scaling"}) {
    if (!fields.Has(key)) continue;
    const json& object = fields.Raw(key);
    if (!object.is_object()) {
      fields.Fail(key, "it must be an object or null");
      return fields.status();
    }
    RopeConfig read = outer;
    JsonFields inner(object, fmt::format("{}: {}", fields.where(), key));
    CheckRopeKeys(object, inner);
    read.theta = inner.Real("rope_theta", 1 + 1e-6, 1e12, outer.theta);
    ReadRopeScaling(inner, max_position_embeddings, read);
    if (outer.original_max_position_embeddings != 0 && inner.Has(inner_length) &&
        read.original_max_position_embeddings != outer.original_max_position_embeddings) {
      inner.Fail(inner_length, fmt::format("beside it, {} is {}", inner_length,
                                           outer.original_max_position_embeddings));
    }
    RETURN_IF_ERROR(inner.status());
    if (rope.has_value() && *rope != read) {
      fields.Fail(key, "rope_parameters says something else");
      return fields.status();
    }
    rope = read;
  }
  return rope.value_or(outer);
}

}  // namespace weft
