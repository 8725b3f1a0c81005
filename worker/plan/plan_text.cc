#include "worker/plan/plan_text.h"

#include <algorithm>
#include <cmath>
#include <vector>

#include "fmt/format.h"
#include "nlohmann/json.hpp"

namespace weft {
namespace {

using nlohmann::ordered_json;

// 1234567 as "1,234,567".
std::string Grouped(std::int64_t value) {
  const std::string digits = fmt::format("{}", value);
  std::string text;
  for (std::size_t i = 0; i < digits.size(); ++i) {
    if (i > 0 && (digits.size() - i) % 3 == 0) text += ',';
    text += digits[i];
  }
  return text;
}

std::string Milliseconds(double seconds) { return fmt::format("{:.2f}", seconds * 1e3); }

std::vector<std::string> Header(bool with_estimates) {
  std::vector<std::string> header = {"T",      "N",         "context",   "KV B/token/rank",
                                     "copies", "KV tokens", "sequences", "DCP B/layer/step"};
  if (with_estimates) {
    header.insert(header.end(),
                  {"step ms", "weights", "KV", "wire", "tok/s", "1 seq", "1 at 1K", "even from"});
  }
  return header;
}

std::vector<std::string> Row(const LayoutPlan& plan) {
  std::vector<std::string> row = {fmt::format("{}", plan.tensor_parallel_size),
                                  fmt::format("{}", plan.decode_context_parallel_size),
                                  Grouped(plan.context),
                                  Grouped(std::llround(plan.kv_bytes_per_token_per_rank)),
                                  fmt::format("{:.2f}", plan.kv_copies),
                                  Grouped(plan.kv_tokens),
                                  Grouped(plan.max_sequences),
                                  Grouped(plan.dcp_wire_bytes_per_layer)};
  if (!plan.step.has_value()) return row;
  const auto ratio = [](std::optional<double> slowdown) {
    return slowdown.has_value() ? fmt::format("{:.2f}x", *slowdown) : "";
  };
  const std::string even = plan.break_even_context.has_value() ? Grouped(*plan.break_even_context)
                           : plan.single_slowdown.has_value()  ? "never"
                                                               : "";
  row.insert(
      row.end(),
      {Milliseconds(plan.step->total()), Milliseconds(plan.step->weights),
       Milliseconds(plan.step->attention), Milliseconds(plan.step->wire),
       plan.tokens_per_second.has_value() ? Grouped(std::llround(*plan.tokens_per_second)) : "",
       ratio(plan.single_slowdown), ratio(plan.short_slowdown), even});
  return row;
}

}  // namespace

std::string PlanText(absl::Span<const LayoutPlan> plans, std::string_view recommendation) {
  const bool with_estimates = !plans.empty() && plans[0].step.has_value();
  std::vector<std::vector<std::string>> rows = {Header(with_estimates)};
  for (const LayoutPlan& plan : plans) rows.push_back(Row(plan));
  std::vector<std::size_t> widths(rows[0].size());
  for (const auto& row : rows) {
    for (std::size_t i = 0; i < row.size(); ++i) widths[i] = std::max(widths[i], row[i].size());
  }
  std::string text;
  for (std::size_t r = 0; r < rows.size(); ++r) {
    for (std::size_t i = 0; i < rows[r].size(); ++i) {
      text += fmt::format("{}{:>{}}", i == 0 ? "" : "  ", rows[r][i], widths[i]);
    }
    if (r > 0) {
      if (plans[r - 1].recommended) text += "  <- recommended";
      if (!plans[r - 1].note.empty()) text += fmt::format("  {}", plans[r - 1].note);
    }
    text += "\n";
  }
  if (with_estimates) {
    text +=
        "\nEstimates, from data sheets: a step of as many sequences as fit, and its parts in ms; "
        "a single sequence against N = 1\n(above 1 it is slower), here and at 1,024 tokens; from "
        "how many tokens on it is not slower.\n";
  }
  text += fmt::format("\nrecommended: {}\n", recommendation);
  return text;
}

std::string PlanJson(absl::Span<const LayoutPlan> plans) {
  ordered_json list = ordered_json::array();
  for (const LayoutPlan& plan : plans) {
    ordered_json object = {
        {"tensor_parallel_size", plan.tensor_parallel_size},
        {"decode_context_parallel_size", plan.decode_context_parallel_size},
        {"context", plan.context},
        {"block_size", plan.block_size},
        {"cp_kv_cache_interleave_size", plan.interleave},
        {"kv_bytes_per_token_per_rank", std::llround(plan.kv_bytes_per_token_per_rank)},
        {"kv_copies", plan.kv_copies},
        {"kv_tokens", plan.kv_tokens},
        {"max_sequences", plan.max_sequences},
        {"kv_memory_bytes", plan.kv_memory_bytes},
        {"weight_bytes_per_rank", plan.weight_bytes_per_rank},
        {"batch", plan.batch},
        {"dcp_wire_bytes_per_layer", plan.dcp_wire_bytes_per_layer},
        {"recommended", plan.recommended},
        {"note", plan.note}};
    if (plan.step.has_value()) {
      object["step_seconds"] = plan.step->total();
      object["step_seconds_weights"] = plan.step->weights;
      object["step_seconds_attention"] = plan.step->attention;
      object["step_seconds_wire"] = plan.step->wire;
      object["step_seconds_overhead"] = plan.step->overhead;
    }
    const auto add = [&object](const char* key, const auto& value) {
      if (value.has_value()) object[key] = *value;
    };
    add("tokens_per_second", plan.tokens_per_second);
    add("single_slowdown", plan.single_slowdown);
    add("short_slowdown", plan.short_slowdown);
    add("break_even_context", plan.break_even_context);
    list.push_back(std::move(object));
  }
  return list.dump(1) + "\n";
}

}  // namespace weft
