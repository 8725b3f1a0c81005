#pragma once

#include <cstdint>
#include <string>
#include <string_view>
#include <vector>

#include "absl/status/statusor.h"

// The part of Jinja2 that chat templates need: what a template is once it is parsed.
namespace weft::jinja {

struct Expr {
  enum class Kind {
    kNone,
    kBool,         // number
    kInt,          // number
    kString,       // text
    kName,         // text
    kList,         // args
    kDict,         // args: key, value, key, value, ...
    kUnary,        // text: "not", "-"; args[0]
    kBinary,       // text: "or", "and", "==", "in", "not in", "+", ...; args[0], args[1]
    kConditional,  // args: value if condition [else value]: condition, value, [other]
    kAttribute,    // args[0].text
    kSubscript,    // args[0][args[1]]
    kSlice,        // args[0][args[1]:args[2]:args[3]]; kNone, or fewer, where nothing stands
    kCall,         // args[0](args[1], ..., keyword_args)
    kFilter,       // args[0] | text(args[1], ..., keyword_args)
    kTest,         // args[0] is text
  };
  Kind kind = Kind::kNone;
  int line = 0;
  std::string text;
  std::int64_t number = 0;
  int height = 1;  // of the tree of its arguments
  std::vector<Expr> args;
  std::vector<std::string> keywords;  // of keyword_args
  std::vector<Expr> keyword_args;
};

struct Node {
  enum class Kind {
    kText,    // text
    kOutput,  // {{ exprs[0] }}
    kIf,      // exprs[0]: body, else other
    kFor,     // targets in exprs[0] [if exprs[1]]: body, when there is nothing: other
    kSet,     // targets[0] or targets[0].targets[1] = exprs[0]
  };
  Kind kind = Kind::kText;
  int line = 0;
  std::string text;
  std::vector<Expr> exprs;
  std::vector<std::string> targets;
  std::vector<Node> body;
  std::vector<Node> other;
};

// How deep expressions and blocks may be nested, and how high an expression's tree may be.
inline constexpr int kMaxDepth = 100;
inline constexpr int kMaxHeight = 200;

// With the options that Hugging Face sets: trim_blocks and lstrip_blocks. INVALID_ARGUMENT, naming
// the line and what was seen, for what is malformed or not supported: macros, includes, raw and
// filter blocks, floats, ...
absl::StatusOr<std::vector<Node>> Parse(std::string_view source);

}  // namespace weft::jinja
