#include "client/sampling_json.h"

#include <charconv>
#include <cstdint>
#include <limits>
#include <optional>
#include <system_error>
#include <vector>

#include "fmt/format.h"
#include "fmt/ranges.h"
#include "google/protobuf/descriptor.h"
#include "nlohmann/json.hpp"
#include "server/base/status_macros.h"

namespace weft {
namespace {

using Json = nlohmann::ordered_json;
using google::protobuf::FieldDescriptor;
using google::protobuf::Reflection;

std::optional<std::int32_t> AsInt32(const Json& value) {
  if (value.is_number_unsigned()) {
    const auto v = value.get<std::uint64_t>();
    if (v > static_cast<std::uint64_t>(std::numeric_limits<std::int32_t>::max())) return {};
    return static_cast<std::int32_t>(v);
  }
  if (!value.is_number_integer()) return {};
  const auto v = value.get<std::int64_t>();
  if (v < std::numeric_limits<std::int32_t>::min()) return {};
  return static_cast<std::int32_t>(v);
}

absl::Status SetScalar(const Json& value, const FieldDescriptor& field,
                       const Reflection& reflection, v1::SamplingParams& sampling) {
  switch (field.cpp_type()) {
    case FieldDescriptor::CPPTYPE_INT32: {
      const std::optional<std::int32_t> v = AsInt32(value);
      if (!v) return WrongJsonType(field.name(), "an integer from -2^31 to 2^31-1", value);
      reflection.SetInt32(&sampling, &field, *v);
      return absl::OkStatus();
    }
    case FieldDescriptor::CPPTYPE_UINT64:
      if (!value.is_number_unsigned()) {
        return WrongJsonType(field.name(), "an integer from 0 to 2^64-1", value);
      }
      reflection.SetUInt64(&sampling, &field, value.get<std::uint64_t>());
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_FLOAT:
      if (!value.is_number()) return WrongJsonType(field.name(), "a number", value);
      reflection.SetFloat(&sampling, &field, value.get<float>());
      return absl::OkStatus();
    case FieldDescriptor::CPPTYPE_BOOL:
      if (!value.is_boolean()) return WrongJsonType(field.name(), "true or false", value);
      reflection.SetBool(&sampling, &field, value.get<bool>());
      return absl::OkStatus();
    default:
      return absl::InternalError(fmt::format("`{}`: a type without JSON", field.name()));
  }
}

absl::Status SetList(const Json& value, const FieldDescriptor& field, const Reflection& reflection,
                     v1::SamplingParams& sampling) {
  if (field.cpp_type() == FieldDescriptor::CPPTYPE_INT32) {
    ASSIGN_OR_RETURN(const std::vector<std::int32_t> ids, TokenIdsFromJson(field.name(), value));
    for (const std::int32_t id : ids) reflection.AddInt32(&sampling, &field, id);
    return absl::OkStatus();
  }
  constexpr std::string_view kWanted = "a list of strings";
  if (!value.is_array()) return WrongJsonType(field.name(), kWanted, value);
  for (const Json& item : value) {
    if (!item.is_string()) return WrongJsonType(field.name(), kWanted, value);
    reflection.AddString(&sampling, &field, item.get<std::string>());
  }
  return absl::OkStatus();
}

absl::Status SetLogitBias(const Json& value, v1::SamplingParams& sampling) {
  constexpr std::string_view kWanted = "an object from token ids to numbers";
  if (!value.is_object()) return WrongJsonType("logit_bias", kWanted, value);
  for (const auto& [name, bias] : value.items()) {
    std::int32_t id = 0;
    const auto [end, error] = std::from_chars(name.data(), name.data() + name.size(), id);
    if (error != std::errc() || end != name.data() + name.size() || !bias.is_number()) {
      return WrongJsonType("logit_bias", kWanted, value);
    }
    (*sampling.mutable_logit_bias())[id] = bias.get<float>();
  }
  return absl::OkStatus();
}

absl::Status SetBadWords(const Json& value, v1::SamplingParams& sampling) {
  if (!value.is_array()) {
    return WrongJsonType("bad_words_token_ids", "a list of lists of token ids", value);
  }
  for (const Json& word : value) {
    ASSIGN_OR_RETURN(const std::vector<std::int32_t> ids,
                     TokenIdsFromJson("bad_words_token_ids", word));
    sampling.add_bad_words_token_ids()->mutable_ids()->Add(ids.begin(), ids.end());
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status SetSamplingField(const std::string& key, const Json& value,
                              v1::SamplingParams& sampling) {
  const FieldDescriptor* field = sampling.GetDescriptor()->FindFieldByName(key);
  if (field == nullptr) return absl::NotFoundError(fmt::format("`{}` is unknown", key));
  const Reflection& reflection = *sampling.GetReflection();
  reflection.ClearField(&sampling, field);
  if (field->is_map()) return SetLogitBias(value, sampling);
  if (field->cpp_type() == FieldDescriptor::CPPTYPE_MESSAGE) return SetBadWords(value, sampling);
  if (field->is_repeated()) return SetList(value, *field, reflection, sampling);
  return SetScalar(value, *field, reflection, sampling);
}

std::string SamplingFieldNames() {
  const google::protobuf::Descriptor& type = *v1::SamplingParams::descriptor();
  std::vector<std::string> names;
  for (int i = 0; i < type.field_count(); ++i) names.push_back(type.field(i)->name());
  return fmt::format("{}", fmt::join(names, ", "));
}

absl::StatusOr<std::vector<std::int32_t>> TokenIdsFromJson(const std::string& key,
                                                           const Json& value) {
  constexpr std::string_view kWanted = "a list of token ids";
  if (!value.is_array()) return WrongJsonType(key, kWanted, value);
  std::vector<std::int32_t> ids;
  ids.reserve(value.size());
  for (const Json& item : value) {
    const std::optional<std::int32_t> id = AsInt32(item);
    if (!id) return WrongJsonType(key, kWanted, value);
    ids.push_back(*id);
  }
  return ids;
}

absl::Status WrongJsonType(const std::string& key, std::string_view wanted, const Json& value) {
  std::string text = value.dump(-1, ' ', false, Json::error_handler_t::replace);
  if (text.size() > 60) text = text.substr(0, 60) + "...";
  return absl::InvalidArgumentError(fmt::format("`{}` is {}; {} is wanted", key, text, wanted));
}

}  // namespace weft
