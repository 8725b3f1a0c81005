// Templates against what Jinja2 renders: data/jinja_features.json, made by
// data/make_jinja_features.py.

#include <fstream>
#include <string>
#include <vector>

#include "gmock/gmock.h"
#include "gtest/gtest.h"
#include "nlohmann/json.hpp"
#include "router/text/jinja_template.h"

namespace weft::jinja {
namespace {

using ::testing::HasSubstr;

Value ToValue(const nlohmann::json& json) {
  if (json.is_string()) return Value(json.get<std::string>());
  if (json.is_boolean()) return Value::Bool(json.get<bool>());
  if (json.is_number()) return Value::Int(json.get<std::int64_t>());
  if (json.is_array()) {
    List list;
    for (const auto& item : json) list.push_back(ToValue(item));
    return Value(std::move(list));
  }
  if (!json.is_object()) return Value();
  Dict dict;
  for (const auto& [key, item] : json.items()) dict.emplace_back(key, ToValue(item));
  return Value(std::move(dict));
}

absl::StatusOr<std::string> Render(const std::string& source, const Dict& variables = {},
                                   const RenderLimits& limits = {}) {
  const absl::StatusOr<Template> parsed = Template::Parse(source);
  if (!parsed.ok()) return parsed.status();
  return parsed->Render(variables, limits);
}

std::string ErrorOf(const std::string& source) {
  const absl::StatusOr<std::string> text = Render(source);
  EXPECT_TRUE(absl::IsInvalidArgument(text.status())) << source << ": " << text.status();
  return std::string(text.status().message());
}

TEST(JinjaTest, RendersWhatJinja2Renders) {
  std::ifstream file(WEFT_SOURCE_DIR "/tests/router/text/data/jinja_features.json");
  const nlohmann::json features = nlohmann::json::parse(file);
  const Value variables = ToValue(features["variables"]);
  EXPECT_GT(features["cases"].size(), 100);
  for (const auto& c : features["cases"]) {
    const absl::StatusOr<std::string> text =
        Render(c["template"].get<std::string>(), *variables.dict());
    const auto name = c["name"].get<std::string>();
    if (c["text"].is_null()) {
      EXPECT_TRUE(absl::IsInvalidArgument(text.status())) << name << ": " << text.status();
    } else {
      ASSERT_TRUE(text.ok()) << name << ": " << text.status();
      EXPECT_EQ(*text, c["text"].get<std::string>()) << name;
    }
  }
}

TEST(JinjaTest, WhatIsNotSupportedIsRefusedByNameAndLine) {
  EXPECT_THAT(ErrorOf("a\n{% macro m(x) %}{% endmacro %}"),
              HasSubstr("line 2: 'macro' is not supported"));
  EXPECT_THAT(ErrorOf("{% include 'x' %}"), HasSubstr("'include'"));
  EXPECT_THAT(ErrorOf("{% raw %}{% endraw %}"), HasSubstr("'raw'"));
  EXPECT_THAT(ErrorOf("\n\n{{ [1] | tojson }}"), HasSubstr("line 3: "));
  EXPECT_THAT(ErrorOf("{{ [1] | tojson }}"), HasSubstr("'tojson' is not supported"));
  EXPECT_THAT(ErrorOf("{{ 'a'.zfill(3) }}"), HasSubstr("'zfill' is not supported"));
  EXPECT_THAT(ErrorOf("{{ 1.5 }}"), HasSubstr("integers"));
  EXPECT_THAT(ErrorOf("{{ 1 / 2 }}"), HasSubstr("'/'"));
  EXPECT_THAT(ErrorOf("{{ 'é' | upper }}"), HasSubstr("ASCII"));
  EXPECT_THAT(ErrorOf("{{ raise_exception('no way') }}"), HasSubstr("no way"));
  // What is not reached does no harm.
  EXPECT_EQ(Render("{% if false %}{{ [1] | tojson }}{% endif %}a").value(), "a");
}

TEST(JinjaTest, NestingIsBounded) {
  for (int levels : {1000, 20000}) {
    const std::string open(levels, '(');
    ErrorOf("{{ " + open + "1" + std::string(levels, ')') + " }}");
    ErrorOf("{{ " + std::string(levels, '[') + " }}");
    ErrorOf("{{ " + std::string(levels, '-') + "1 }}");
    std::string nots;
    std::string sum;
    std::string ifs;
    for (int i = 0; i < levels; ++i) {
      nots += "not ";
      sum += "1 + ";
      ifs += "{% if true %}";
    }
    ErrorOf("{{ " + nots + "1 }}");
    ErrorOf("{{ " + sum + "1 }}");
    ErrorOf(ifs);
  }
  // A value that grows inwards, and one that holds itself.
  ErrorOf(
      "{% set ns = namespace(x=[]) %}{% for i in range(500) %}{% set ns.x = [ns.x] %}{% endfor %}");
  ErrorOf("{% set ns = namespace() %}{% set ns.x = ns %}");
}

TEST(JinjaTest, WorkIsBounded) {
  const std::string loops =
      "{% for i in range(200) %}{% for j in range(200) %}x{% endfor %}{% endfor %}";
  EXPECT_EQ(Render(loops).value().size(), 40000);
  EXPECT_TRUE(absl::IsResourceExhausted(Render(loops, {}, {.max_steps = 10000}).status()));
  const std::string doubling =
      "{% set ns = namespace(s='xx') %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% "
      "endfor %}";
  EXPECT_TRUE(absl::IsResourceExhausted(Render(doubling, {}, {.max_bytes = 1 << 20}).status()));
  const std::string lists =
      "{% set ns = namespace(s=[1, 2]) %}{% for i in range(100) %}{% set ns.s = ns.s + ns.s %}{% "
      "endfor %}";
  EXPECT_TRUE(absl::IsResourceExhausted(Render(lists, {}, {.max_steps = 100000}).status()));
  EXPECT_TRUE(absl::IsInvalidArgument(Render("{{ range(1000000) | length }}").status()));
}

}  // namespace
}  // namespace weft::jinja
