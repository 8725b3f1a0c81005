#include "router/text/jinja_template.h"

#include <fmt/format.h>

#include <algorithm>
#include <optional>
#include <utility>

#include "absl/status/status.h"
#include "router/text/jinja_builtins.h"
#include "router/text/jinja_lexer.h"
#include "router/text/jinja_text.h"
#include "server/base/status_macros.h"

namespace weft::jinja {
namespace {

using ValueOr = absl::StatusOr<Value>;

absl::Status Undefined(const Expr& expr, const Value& value) {
  return Error(expr.line, fmt::format("'{}' is undefined", value.undefined_name()));
}

// Errors of builtins learn where they happened.
ValueOr At(int line, ValueOr result) {
  if (result.ok()) return result;
  return Error(line, std::string(result.status().message()));
}

class Renderer {
 public:
  Renderer(const Dict& variables, const RenderLimits& limits)
      : limits_(limits), scopes_{{variables}} {}

  absl::StatusOr<std::string> Run(const std::vector<Node>& nodes) {
    RETURN_IF_ERROR(RenderAll(nodes));
    return std::move(out_);
  }

 private:
  absl::Status Step() {
    if (++steps_ <= limits_.max_steps) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        fmt::format("the chat template takes more than {} steps", limits_.max_steps));
  }
  absl::Status Charge(std::size_t bytes) {
    bytes_ += static_cast<std::int64_t>(bytes);
    if (bytes_ <= limits_.max_bytes) return absl::OkStatus();
    return absl::ResourceExhaustedError(
        fmt::format("the chat template makes more than {} bytes of text", limits_.max_bytes));
  }

  // --- Statements.

  absl::Status RenderAll(const std::vector<Node>& nodes) {
    for (const Node& node : nodes) {
      RETURN_IF_ERROR(Step());
      RETURN_IF_ERROR(Render(node));
    }
    return absl::OkStatus();
  }

  absl::Status Render(const Node& node) {
    switch (node.kind) {
      case Node::Kind::kText:
        RETURN_IF_ERROR(Charge(node.text.size()));
        out_ += node.text;
        return absl::OkStatus();
      case Node::Kind::kOutput: {
        ASSIGN_OR_RETURN(const Value value, Evaluate(node.exprs[0]));
        const absl::StatusOr<std::string> text = ToText(value);
        if (!text.ok()) return Error(node.line, std::string(text.status().message()));
        RETURN_IF_ERROR(Charge(text->size()));
        out_ += *text;
        return absl::OkStatus();
      }
      case Node::Kind::kIf: {
        ASSIGN_OR_RETURN(const Value condition, Evaluate(node.exprs[0]));
        return RenderAll(condition.Truthy() ? node.body : node.other);
      }
      case Node::Kind::kFor:
        return RenderFor(node);
      case Node::Kind::kSet:
        return RenderSet(node);
    }
    return absl::InternalError("a statement of no kind");
  }

  absl::Status RenderSet(const Node& node) {
    ASSIGN_OR_RETURN(Value value, Evaluate(node.exprs[0]));
    if (node.targets.size() == 1) {
      Assign(scopes_.back(), node.targets[0], std::move(value));
      return absl::OkStatus();
    }
    const Value* target = Lookup(node.targets[0]);
    Dict* attributes = target == nullptr ? nullptr : target->namespace_attributes();
    if (attributes == nullptr) {
      return Error(node.line, fmt::format("'{}' is no namespace", node.targets[0]));
    }
    RETURN_IF_ERROR(CheckStorable(node.line, value));
    Assign(*attributes, node.targets[1], std::move(value));
    return absl::OkStatus();
  }

  absl::Status RenderFor(const Node& node) {
    ASSIGN_OR_RETURN(const List items, ItemsOf(node));
    if (items.empty()) return RenderAll(node.other);
    scopes_.emplace_back();
    for (std::size_t i = 0; i < items.size(); ++i) {
      scopes_.back().clear();
      RETURN_IF_ERROR(Bind(node, items[i]));
      Assign(scopes_.back(), "loop", LoopVariable(items, i));
      RETURN_IF_ERROR(RenderAll(node.body));
    }
    scopes_.pop_back();
    return absl::OkStatus();
  }

  absl::Status Bind(const Node& node, const Value& item) {
    if (node.targets.size() == 1) {
      Assign(scopes_.back(), node.targets[0], item);
      return absl::OkStatus();
    }
    if (item.list() == nullptr || item.list()->size() != node.targets.size()) {
      return Error(node.line,
                   fmt::format("an item of the loop does not have {} parts", node.targets.size()));
    }
    for (std::size_t i = 0; i < node.targets.size(); ++i) {
      Assign(scopes_.back(), node.targets[i], (*item.list())[i]);
    }
    return absl::OkStatus();
  }

  static Value LoopVariable(const List& items, std::size_t i) {
    const auto index = static_cast<std::int64_t>(i);
    const auto size = static_cast<std::int64_t>(items.size());
    return Value(Dict{
        {"index", Value::Int(index + 1)},
        {"index0", Value::Int(index)},
        {"revindex", Value::Int(size - index)},
        {"revindex0", Value::Int(size - index - 1)},
        {"first", Value::Bool(i == 0)},
        {"last", Value::Bool(index + 1 == size)},
        {"length", Value::Int(size)},
        {"previtem", i == 0 ? Value(Value::Undefined{"loop.previtem"}) : items[i - 1]},
        {"nextitem", index + 1 == size ? Value(Value::Undefined{"loop.nextitem"}) : items[i + 1]}});
  }

  // What a loop runs over, its filter applied.
  absl::StatusOr<List> ItemsOf(const Node& node) {
    ASSIGN_OR_RETURN(const Value value, Evaluate(node.exprs[0]));
    List items;
    if (value.list() != nullptr) {
      items = *value.list();
    } else if (value.dict() != nullptr && value.namespace_attributes() == nullptr) {
      for (const auto& [key, item] : *value.dict()) items.emplace_back(key);
    } else if (!value.is_undefined()) {
      return Error(node.line, fmt::format("a loop over {} is not supported", value.KindName()));
    }
    steps_ += static_cast<std::int64_t>(items.size());
    if (node.exprs.size() == 1) return items;
    List kept;
    scopes_.emplace_back();
    for (Value& item : items) {
      RETURN_IF_ERROR(Bind(node, item));
      ASSIGN_OR_RETURN(const Value wanted, Evaluate(node.exprs[1]));
      if (wanted.Truthy()) kept.push_back(std::move(item));
    }
    scopes_.pop_back();
    return kept;
  }

  static void Assign(Dict& scope, const std::string& name, Value value) {
    for (auto& [key, old] : scope) {
      if (key != name) continue;
      old = std::move(value);
      return;
    }
    scope.emplace_back(name, std::move(value));
  }

  const Value* Lookup(std::string_view name) const {
    for (auto scope = scopes_.rbegin(); scope != scopes_.rend(); ++scope) {
      if (const Value* found = Find(*scope, name)) return found;
    }
    return nullptr;
  }

  // Namespaces in values would make cycles; values without bound could not be destroyed.
  static absl::Status CheckStorable(int line, const Value& value) {
    if (value.namespace_attributes() != nullptr) {
      return Error(line, "a namespace as a part of another value is not supported");
    }
    if (value.depth() < kMaxDepth) return absl::OkStatus();
    return Error(line, fmt::format("a value of more than {} levels", kMaxDepth));
  }

  // --- Expressions.

  ValueOr Evaluate(const Expr& expr) {
    RETURN_IF_ERROR(Step());
    ASSIGN_OR_RETURN(Value value, EvaluateKind(expr));
    const bool made = expr.kind == Expr::Kind::kBinary || expr.kind == Expr::Kind::kCall ||
                      expr.kind == Expr::Kind::kFilter;
    if (made && value.string() != nullptr) RETURN_IF_ERROR(Charge(value.string()->size()));
    return value;
  }

  ValueOr EvaluateKind(const Expr& expr) {
    switch (expr.kind) {
      case Expr::Kind::kNone:
        return Value();
      case Expr::Kind::kBool:
        return Value::Bool(expr.number != 0);
      case Expr::Kind::kInt:
        return Value::Int(expr.number);
      case Expr::Kind::kString:
        return Value(expr.text);
      case Expr::Kind::kName: {
        const Value* found = Lookup(expr.text);
        return found != nullptr ? *found : Value(Value::Undefined{expr.text});
      }
      case Expr::Kind::kList: {
        ASSIGN_OR_RETURN(std::vector<Value> items, EvaluateAll(expr, 0));
        return Value(std::move(items));
      }
      case Expr::Kind::kDict:
        return MakeDict(expr);
      case Expr::Kind::kUnary:
        return Unary(expr);
      case Expr::Kind::kBinary:
        return Binary(expr);
      case Expr::Kind::kConditional: {
        ASSIGN_OR_RETURN(const Value condition, Evaluate(expr.args[0]));
        if (condition.Truthy()) return Evaluate(expr.args[1]);
        if (expr.args.size() == 3) return Evaluate(expr.args[2]);
        return Value(Value::Undefined{"the value without an else"});
      }
      case Expr::Kind::kAttribute: {
        ASSIGN_OR_RETURN(const Value object, Evaluate(expr.args[0]));
        return Member(expr, object, expr.text);
      }
      case Expr::Kind::kSubscript:
        return Subscript(expr);
      case Expr::Kind::kSlice:
        return Slice(expr);
      case Expr::Kind::kCall:
        return Call(expr);
      case Expr::Kind::kFilter: {
        ASSIGN_OR_RETURN(const Value value, Evaluate(expr.args[0]));
        ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expr));
        return At(expr.line, ApplyFilter(expr.text, value, arguments));
      }
      case Expr::Kind::kTest:
        return Test(expr);
    }
    return absl::InternalError("an expression of no kind");
  }

  absl::StatusOr<std::vector<Value>> EvaluateAll(const Expr& expr, std::size_t first) {
    std::vector<Value> values;
    for (std::size_t i = first; i < expr.args.size(); ++i) {
      ASSIGN_OR_RETURN(Value value, Evaluate(expr.args[i]));
      RETURN_IF_ERROR(CheckStorable(expr.line, value));
      values.push_back(std::move(value));
    }
    return values;
  }

  absl::StatusOr<Arguments> EvaluateArguments(const Expr& expr) {
    Arguments arguments;
    ASSIGN_OR_RETURN(arguments.values, EvaluateAll(expr, 1));
    for (std::size_t i = 0; i < expr.keywords.size(); ++i) {
      ASSIGN_OR_RETURN(Value value, Evaluate(expr.keyword_args[i]));
      RETURN_IF_ERROR(CheckStorable(expr.line, value));
      arguments.keywords.emplace_back(expr.keywords[i], std::move(value));
    }
    return arguments;
  }

  ValueOr MakeDict(const Expr& expr) {
    ASSIGN_OR_RETURN(std::vector<Value> parts, EvaluateAll(expr, 0));
    Dict dict;
    for (std::size_t i = 0; i < parts.size(); i += 2) {
      if (parts[i].string() == nullptr) return Error(expr.line, "keys other than strings");
      Assign(dict, *parts[i].string(), std::move(parts[i + 1]));
    }
    return Value(std::move(dict));
  }

  ValueOr Unary(const Expr& expr) {
    ASSIGN_OR_RETURN(const Value value, Evaluate(expr.args[0]));
    if (expr.text == "not") return Value::Bool(!value.Truthy());
    std::int64_t negated = 0;
    if (value.integer() == nullptr || __builtin_sub_overflow(0, *value.integer(), &negated)) {
      return Error(expr.line, fmt::format("-({}) is not supported", value.KindName()));
    }
    return Value::Int(negated);
  }

  ValueOr Binary(const Expr& expr) {
    ASSIGN_OR_RETURN(Value left, Evaluate(expr.args[0]));
    const std::string& op = expr.text;
    if (op == "and" || op == "or") {
      if (left.Truthy() == (op == "or")) return left;
      return Evaluate(expr.args[1]);
    }
    ASSIGN_OR_RETURN(const Value right, Evaluate(expr.args[1]));
    if (op == "==" || op == "!=") return Value::Bool(Equal(left, right) == (op == "=="));
    if (op == "in" || op == "not in") {
      ASSIGN_OR_RETURN(const bool contained, Contains(expr, right, left));
      return Value::Bool(contained == (op == "in"));
    }
    if (op == "~") {
      const absl::StatusOr<std::string> a = ToText(left);
      const absl::StatusOr<std::string> b = ToText(right);
      if (!a.ok()) return At(expr.line, a.status());
      if (!b.ok()) return At(expr.line, b.status());
      return Value(*a + *b);
    }
    if (left.is_undefined()) return Undefined(expr, left);
    if (right.is_undefined()) return Undefined(expr, right);
    if (left.string() != nullptr && right.string() != nullptr) {
      if (op == "+") return Value(*left.string() + *right.string());
      return Compare(expr, left, right, left.string()->compare(*right.string()));
    }
    if (op == "+" && left.list() != nullptr && right.list() != nullptr) {
      List joined = *left.list();
      joined.insert(joined.end(), right.list()->begin(), right.list()->end());
      steps_ += static_cast<std::int64_t>(joined.size());
      return Value(std::move(joined));
    }
    if (left.integer() == nullptr || right.integer() == nullptr) {
      return Mismatch(expr, left, right);
    }
    const std::int64_t a = *left.integer();
    const std::int64_t b = *right.integer();
    if (op[0] == '<' || op[0] == '>') return Compare(expr, left, right, a < b ? -1 : a > b);
    return Arithmetic(expr, a, b);
  }

  static absl::Status Mismatch(const Expr& expr, const Value& left, const Value& right) {
    return Error(expr.line, fmt::format("'{}' of {} and {} is not supported", expr.text,
                                        left.KindName(), right.KindName()));
  }

  static ValueOr Compare(const Expr& expr, const Value& left, const Value& right, int order) {
    if (expr.text == "<") return Value::Bool(order < 0);
    if (expr.text == "<=") return Value::Bool(order <= 0);
    if (expr.text == ">") return Value::Bool(order > 0);
    if (expr.text == ">=") return Value::Bool(order >= 0);
    return Mismatch(expr, left, right);
  }

  // As Python: // and % round down.
  static ValueOr Arithmetic(const Expr& expr, std::int64_t a, std::int64_t b) {
    std::int64_t result = 0;
    bool overflow = false;
    if (expr.text == "+") overflow = __builtin_add_overflow(a, b, &result);
    if (expr.text == "-") overflow = __builtin_sub_overflow(a, b, &result);
    if (expr.text == "*") overflow = __builtin_mul_overflow(a, b, &result);
    if (expr.text == "//" || expr.text == "%") {
      if (b == 0 || b == -1) {  // -1 could overflow
        return Error(expr.line, fmt::format("{} {} {} is not supported", a, expr.text, b));
      }
      const bool rounds = a % b != 0 && (a < 0) != (b < 0);
      result = expr.text == "//" ? a / b - (rounds ? 1 : 0) : a % b + (rounds ? b : 0);
    }
    if (overflow) return Error(expr.line, "an integer does not fit into 64 bits");
    return Value::Int(result);
  }

  // Beyond the limit the answer is wrong, and the next Step() ends it all.
  bool Equal(const Value& a, const Value& b) {
    return Value::Equal(a, b, limits_.max_steps, steps_);
  }

  absl::StatusOr<bool> Contains(const Expr& expr, const Value& whole, const Value& part) {
    if (whole.string() != nullptr && part.string() != nullptr) {
      return whole.string()->find(*part.string()) != std::string::npos;
    }
    if (whole.list() != nullptr) {
      return std::any_of(whole.list()->begin(), whole.list()->end(),
                         [&](const Value& item) { return Equal(item, part); });
    }
    if (whole.dict() != nullptr && whole.namespace_attributes() == nullptr) {
      return part.string() != nullptr && Find(*whole.dict(), *part.string()) != nullptr;
    }
    if (whole.is_undefined()) return false;
    return Mismatch(expr, part, whole);
  }

  static ValueOr Member(const Expr& expr, const Value& object, const std::string& name) {
    if (object.is_undefined()) return Undefined(expr, object);
    if (object.dict() != nullptr) {
      if (const Value* found = Find(*object.dict(), name)) return *found;
    }
    return Value(Value::Undefined{name});
  }

  ValueOr Subscript(const Expr& expr) {
    ASSIGN_OR_RETURN(const Value object, Evaluate(expr.args[0]));
    ASSIGN_OR_RETURN(const Value index, Evaluate(expr.args[1]));
    if (object.is_undefined()) return Undefined(expr, object);
    if (object.list() != nullptr && index.integer() != nullptr) {
      const auto size = static_cast<std::int64_t>(object.list()->size());
      const std::int64_t at = *index.integer() < 0 ? *index.integer() + size : *index.integer();
      if (at >= 0 && at < size) return (*object.list())[at];
      return Value(Value::Undefined{fmt::format("[{}]", *index.integer())});
    }
    if (object.dict() != nullptr && index.string() != nullptr) {
      return Member(expr, object, *index.string());
    }
    return Error(expr.line,
                 fmt::format("{} of {} is not supported", index.KindName(), object.KindName()));
  }

  // Of lists, as Python's.
  ValueOr Slice(const Expr& expr) {
    ASSIGN_OR_RETURN(const Value object, Evaluate(expr.args[0]));
    std::optional<std::int64_t> bounds[3];
    for (std::size_t i = 1; i < expr.args.size(); ++i) {
      ASSIGN_OR_RETURN(const Value bound, Evaluate(expr.args[i]));
      if (bound.integer() != nullptr) bounds[i - 1] = *bound.integer();
      if (bound.integer() == nullptr && !bound.is_none()) {
        return Error(expr.line, fmt::format("{} as a bound of a slice", bound.KindName()));
      }
    }
    const std::int64_t step = bounds[2].value_or(1);
    if (object.list() == nullptr || (step != 1 && step != -1)) {
      return Error(expr.line, "only slices of lists with a step of 1 or -1 are supported");
    }
    const auto size = static_cast<std::int64_t>(object.list()->size());
    // Positions from `low` to `high`, both included for a negative step's sake.
    const auto place = [&](std::optional<std::int64_t> bound, std::int64_t otherwise) {
      if (!bound) return otherwise;
      const std::int64_t at = *bound < 0 ? std::max(*bound, -size - 1) + size : *bound;
      return step > 0 ? std::clamp<std::int64_t>(at, 0, size)
                      : std::clamp<std::int64_t>(at, -1, size - 1);
    };
    const std::int64_t begin = place(bounds[0], step > 0 ? 0 : size - 1);
    const std::int64_t end = place(bounds[1], step > 0 ? size : -1);
    List items;
    for (std::int64_t i = begin; step > 0 ? i < end : i > end; i += step) {
      items.push_back((*object.list())[i]);
    }
    steps_ += static_cast<std::int64_t>(items.size());
    return Value(std::move(items));
  }

  ValueOr Call(const Expr& expr) {
    const Expr& callee = expr.args[0];
    ASSIGN_OR_RETURN(const Arguments arguments, EvaluateArguments(expr));
    if (callee.kind == Expr::Kind::kName) {
      ValueOr result = At(expr.line, CallFunction(callee.text, arguments));
      if (result.ok() && result->list() != nullptr) {
        steps_ += static_cast<std::int64_t>(result->list()->size());
      }
      return result;
    }
    if (callee.kind != Expr::Kind::kAttribute) return Error(expr.line, "this cannot be called");
    ASSIGN_OR_RETURN(const Value object, Evaluate(callee.args[0]));
    // What a method makes is about as long as what it is given.
    if (object.string() != nullptr) RETURN_IF_ERROR(Charge(object.string()->size()));
    return At(expr.line, CallMethod(object, callee.text, arguments));
  }

  ValueOr Test(const Expr& expr) {
    if (expr.args.size() > 1 || !expr.keyword_args.empty()) {
      return Error(expr.line,
                   fmt::format("the test '{}' with arguments is not supported", expr.text));
    }
    if (expr.text == "defined" && expr.args[0].kind == Expr::Kind::kName &&
        IsFunction(expr.args[0].text)) {
      return Value::Bool(true);
    }
    ASSIGN_OR_RETURN(const Value value, Evaluate(expr.args[0]));
    const absl::StatusOr<bool> passed = ApplyTest(expr.text, value);
    if (!passed.ok()) return At(expr.line, passed.status());
    return Value::Bool(*passed);
  }

  const RenderLimits limits_;
  std::vector<Dict> scopes_;  // the innermost last
  std::string out_;
  std::int64_t steps_ = 0;
  std::int64_t bytes_ = 0;
};

}  // namespace

absl::StatusOr<Template> Template::Parse(std::string_view source) {
  ASSIGN_OR_RETURN(std::vector<Node> nodes, jinja::Parse(source));
  return Template(std::move(nodes));
}

absl::StatusOr<std::string> Template::Render(const Dict& variables,
                                             const RenderLimits& limits) const {
  return Renderer(variables, limits).Run(nodes_);
}

}  // namespace weft::jinja
