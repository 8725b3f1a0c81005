#include <fmt/format.h>

#include <algorithm>
#include <iterator>
#include <utility>

#include "router/text/jinja_ast.h"
#include "router/text/jinja_lexer.h"
#include "server/base/status_macros.h"

namespace weft::jinja {
namespace {

class Parser {
 public:
  explicit Parser(std::vector<Token> tokens) : tokens_(std::move(tokens)) {}

  absl::StatusOr<std::vector<Node>> Run() {
    ASSIGN_OR_RETURN(std::vector<Node> nodes, Nodes());
    if (Next().kind == Token::Kind::kEnd) return nodes;
    return Error(Next().line, fmt::format("'{}' has no beginning", tokens_[at_ + 1].text));
  }

 private:
  using ExprOr = absl::StatusOr<Expr>;

  // Counts how deep the parser is; its destructor counts back.
  class Nested {
   public:
    explicit Nested(int& depth) : depth_(++depth) {}
    ~Nested() { --depth_; }
    Nested(const Nested&) = delete;
    Nested& operator=(const Nested&) = delete;

   private:
    int& depth_;
  };

  const Token& Next() const { return tokens_[at_]; }
  bool Is(Token::Kind kind, std::string_view text) const {
    return Next().kind == kind && Next().text == text;
  }
  bool IsOperator(std::string_view text) const { return Is(Token::Kind::kOperator, text); }
  bool IsName(std::string_view text) const { return Is(Token::Kind::kName, text); }
  bool Take(Token::Kind kind, std::string_view text) {
    if (!Is(kind, text)) return false;
    ++at_;
    return true;
  }
  bool TakeOperator(std::string_view text) { return Take(Token::Kind::kOperator, text); }
  bool TakeName(std::string_view text) { return Take(Token::Kind::kName, text); }

  absl::Status Unexpected(std::string_view wanted) const {
    const Token& next = Next();
    const bool tag_end =
        next.kind == Token::Kind::kBlockEnd || next.kind == Token::Kind::kOutputEnd;
    return Error(next.line,
                 fmt::format("{} is expected, not {}", wanted,
                             tag_end ? "the end of the tag" : fmt::format("'{}'", next.text)));
  }
  absl::Status Expect(std::string_view op) {
    return TakeOperator(op) ? absl::OkStatus() : Unexpected(fmt::format("'{}'", op));
  }
  absl::Status ExpectBlockEnd() {
    if (Next().kind != Token::Kind::kBlockEnd) return Unexpected("the end of the tag");
    ++at_;
    return absl::OkStatus();
  }
  absl::StatusOr<std::string> ExpectName() {
    if (Next().kind != Token::Kind::kName) return Unexpected("a name");
    return tokens_[at_++].text;
  }
  absl::Status CheckDepth() const {
    if (depth_ <= kMaxDepth) return absl::OkStatus();
    return Error(Next().line, fmt::format("more than {} levels of nesting", kMaxDepth));
  }

  // --- Statements.

  static bool EndsBlock(std::string_view name) {
    constexpr std::string_view kEnds[] = {"endif", "endfor", "else", "elif"};
    return std::find(std::begin(kEnds), std::end(kEnds), name) != std::end(kEnds);
  }

  // Up to the end, or a tag that ends or continues a block, which is left.
  absl::StatusOr<std::vector<Node>> Nodes() {
    const Nested nested(depth_);
    RETURN_IF_ERROR(CheckDepth());
    std::vector<Node> nodes;
    while (Next().kind != Token::Kind::kEnd) {
      if (Next().kind == Token::Kind::kText) {
        nodes.push_back(
            {.kind = Node::Kind::kText, .line = Next().line, .text = std::move(tokens_[at_].text)});
        ++at_;
      } else if (Next().kind == Token::Kind::kOutputBegin) {
        Node node{.kind = Node::Kind::kOutput, .line = Next().line};
        ++at_;
        ASSIGN_OR_RETURN(Expr value, Expression());
        if (Next().kind != Token::Kind::kOutputEnd) return Unexpected("the end of the tag");
        ++at_;
        node.exprs.push_back(std::move(value));
        nodes.push_back(std::move(node));
      } else {
        if (EndsBlock(tokens_[at_ + 1].text)) break;
        ++at_;
        ASSIGN_OR_RETURN(Node node, Statement());
        nodes.push_back(std::move(node));
      }
    }
    return nodes;
  }

  absl::StatusOr<Node> Statement() {
    if (TakeName("if")) return If();
    if (TakeName("for")) return For();
    if (TakeName("set")) return Set();
    return Error(Next().line,
                 fmt::format("'{}' is not supported; if, for and set are", Next().text));
  }

  // Behind the tag that begins with `if` or `elif`.
  absl::StatusOr<Node> If() {
    const Nested nested(depth_);
    RETURN_IF_ERROR(CheckDepth());
    Node node{.kind = Node::Kind::kIf, .line = Next().line};
    ASSIGN_OR_RETURN(Expr condition, Expression());
    node.exprs.push_back(std::move(condition));
    RETURN_IF_ERROR(ExpectBlockEnd());
    ASSIGN_OR_RETURN(node.body, Nodes());
    RETURN_IF_ERROR(BlockGoesOn("if", node.line));
    if (TakeName("elif")) {
      ASSIGN_OR_RETURN(Node rest, If());
      node.other.push_back(std::move(rest));
      return node;  // the rest has taken the endif
    }
    RETURN_IF_ERROR(Else("if", "endif", node));
    return node;
  }

  absl::StatusOr<Node> For() {
    Node node{.kind = Node::Kind::kFor, .line = Next().line};
    do {
      ASSIGN_OR_RETURN(std::string name, ExpectName());
      node.targets.push_back(std::move(name));
    } while (TakeOperator(","));
    if (!TakeName("in")) return Unexpected("'in'");
    ASSIGN_OR_RETURN(Expr items, Or());  // not a conditional: its `if` filters
    node.exprs.push_back(std::move(items));
    if (TakeName("if")) {
      ASSIGN_OR_RETURN(Expr filter, Expression());
      node.exprs.push_back(std::move(filter));
    }
    RETURN_IF_ERROR(ExpectBlockEnd());
    ASSIGN_OR_RETURN(node.body, Nodes());
    RETURN_IF_ERROR(BlockGoesOn("for", node.line));
    RETURN_IF_ERROR(Else("for", "endfor", node));
    return node;
  }

  absl::StatusOr<Node> Set() {
    Node node{.kind = Node::Kind::kSet, .line = Next().line};
    ASSIGN_OR_RETURN(std::string name, ExpectName());
    node.targets.push_back(std::move(name));
    if (TakeOperator(".")) {
      ASSIGN_OR_RETURN(std::string attribute, ExpectName());
      node.targets.push_back(std::move(attribute));
    }
    RETURN_IF_ERROR(Expect("="));
    ASSIGN_OR_RETURN(Expr value, Expression());
    node.exprs.push_back(std::move(value));
    RETURN_IF_ERROR(ExpectBlockEnd());
    return node;
  }

  absl::Status BlockGoesOn(std::string_view block, int line) {
    if (Next().kind == Token::Kind::kEnd) {
      return Error(line, fmt::format("'{}' has no end", block));
    }
    ++at_;  // the beginning of the tag
    return absl::OkStatus();
  }

  // `[else ...] end`, behind the beginning of its first tag.
  absl::Status Else(std::string_view block, std::string_view end, Node& node) {
    if (TakeName("else")) {
      RETURN_IF_ERROR(ExpectBlockEnd());
      ASSIGN_OR_RETURN(node.other, Nodes());
      RETURN_IF_ERROR(BlockGoesOn(block, node.line));
    }
    if (!TakeName(end)) return Unexpected(fmt::format("'{}'", end));
    return ExpectBlockEnd();
  }

  // --- Expressions, the loosest first.

  Expr Make(Expr::Kind kind, std::string text = "") const {
    return {.kind = kind, .line = Next().line, .text = std::move(text)};
  }
  absl::Status Adopt(Expr& parent, Expr child) const {
    parent.height = std::max(parent.height, child.height + 1);
    if (parent.height > kMaxHeight) {
      return Error(child.line, fmt::format("an expression of more than {} levels", kMaxHeight));
    }
    parent.args.push_back(std::move(child));
    return absl::OkStatus();
  }
  ExprOr Binary(std::string op, Expr left, Expr right) const {
    Expr expr = Make(Expr::Kind::kBinary, std::move(op));
    RETURN_IF_ERROR(Adopt(expr, std::move(left)));
    RETURN_IF_ERROR(Adopt(expr, std::move(right)));
    return expr;
  }

  ExprOr Expression() {
    const Nested nested(depth_);
    RETURN_IF_ERROR(CheckDepth());
    ASSIGN_OR_RETURN(Expr value, Or());
    if (!TakeName("if")) return value;
    Expr expr = Make(Expr::Kind::kConditional);
    ASSIGN_OR_RETURN(Expr condition, Or());
    RETURN_IF_ERROR(Adopt(expr, std::move(condition)));
    RETURN_IF_ERROR(Adopt(expr, std::move(value)));
    if (TakeName("else")) {
      ASSIGN_OR_RETURN(Expr other, Expression());
      RETURN_IF_ERROR(Adopt(expr, std::move(other)));
    }
    return expr;
  }

  ExprOr Or() {
    ASSIGN_OR_RETURN(Expr left, And());
    while (TakeName("or")) {
      ASSIGN_OR_RETURN(Expr right, And());
      ASSIGN_OR_RETURN(left, Binary("or", std::move(left), std::move(right)));
    }
    return left;
  }

  ExprOr And() {
    ASSIGN_OR_RETURN(Expr left, Not());
    while (TakeName("and")) {
      ASSIGN_OR_RETURN(Expr right, Not());
      ASSIGN_OR_RETURN(left, Binary("and", std::move(left), std::move(right)));
    }
    return left;
  }

  ExprOr Not() {
    const Nested nested(depth_);
    RETURN_IF_ERROR(CheckDepth());
    if (!TakeName("not")) return Comparison();
    Expr expr = Make(Expr::Kind::kUnary, "not");
    ASSIGN_OR_RETURN(Expr operand, Not());
    RETURN_IF_ERROR(Adopt(expr, std::move(operand)));
    return expr;
  }

  // Empty when none comes.
  std::string TakeComparison() {
    for (const std::string_view op : {"==", "!=", "<=", ">=", "<", ">"}) {
      if (TakeOperator(op)) return std::string(op);
    }
    if (TakeName("in")) return "in";
    if (IsName("not") && tokens_[at_ + 1].kind == Token::Kind::kName &&
        tokens_[at_ + 1].text == "in") {
      at_ += 2;
      return "not in";
    }
    return "";
  }

  ExprOr Comparison() {
    ASSIGN_OR_RETURN(Expr left, Sum());
    std::string op = TakeComparison();
    if (op.empty()) return left;
    ASSIGN_OR_RETURN(Expr right, Sum());
    if (!TakeComparison().empty()) {
      return Error(Next().line, "comparisons in a row are not supported");
    }
    return Binary(std::move(op), std::move(left), std::move(right));
  }

  ExprOr Sum() {
    ASSIGN_OR_RETURN(Expr left, Concatenation());
    while (IsOperator("+") || IsOperator("-")) {
      std::string op = tokens_[at_++].text;
      ASSIGN_OR_RETURN(Expr right, Concatenation());
      ASSIGN_OR_RETURN(left, Binary(std::move(op), std::move(left), std::move(right)));
    }
    return left;
  }

  ExprOr Concatenation() {
    ASSIGN_OR_RETURN(Expr left, Product());
    while (TakeOperator("~")) {
      ASSIGN_OR_RETURN(Expr right, Product());
      ASSIGN_OR_RETURN(left, Binary("~", std::move(left), std::move(right)));
    }
    return left;
  }

  ExprOr Product() {
    ASSIGN_OR_RETURN(Expr left, Filtered());
    while (IsOperator("*") || IsOperator("//") || IsOperator("%")) {
      std::string op = tokens_[at_++].text;
      ASSIGN_OR_RETURN(Expr right, Filtered());
      ASSIGN_OR_RETURN(left, Binary(std::move(op), std::move(left), std::move(right)));
    }
    if (IsOperator("/")) return Error(Next().line, "'/' is not supported; '//' is");
    return left;
  }

  // A value with the filters and tests behind it.
  ExprOr Filtered() {
    ASSIGN_OR_RETURN(Expr value, Signed());
    while (IsOperator("|") || IsName("is")) {
      if (TakeOperator("|")) {
        Expr expr = Make(Expr::Kind::kFilter);
        ASSIGN_OR_RETURN(expr.text, ExpectName());
        RETURN_IF_ERROR(Adopt(expr, std::move(value)));
        if (TakeOperator("(")) RETURN_IF_ERROR(Arguments(expr));
        value = std::move(expr);
      } else {
        ++at_;
        const bool negated = TakeName("not");
        Expr expr = Make(Expr::Kind::kTest);
        ASSIGN_OR_RETURN(expr.text, ExpectName());
        RETURN_IF_ERROR(Adopt(expr, std::move(value)));
        if (TakeOperator("(")) RETURN_IF_ERROR(Arguments(expr));
        value = std::move(expr);
        if (!negated) continue;
        Expr inverse = Make(Expr::Kind::kUnary, "not");
        RETURN_IF_ERROR(Adopt(inverse, std::move(value)));
        value = std::move(inverse);
      }
    }
    return value;
  }

  ExprOr Signed() {
    const Nested nested(depth_);
    RETURN_IF_ERROR(CheckDepth());
    if (!TakeOperator("-")) return Postfix();
    Expr expr = Make(Expr::Kind::kUnary, "-");
    ASSIGN_OR_RETURN(Expr operand, Signed());
    RETURN_IF_ERROR(Adopt(expr, std::move(operand)));
    return expr;
  }

  ExprOr Postfix() {
    ASSIGN_OR_RETURN(Expr value, Primary());
    while (true) {
      if (TakeOperator(".")) {
        Expr expr = Make(Expr::Kind::kAttribute);
        ASSIGN_OR_RETURN(expr.text, ExpectName());
        RETURN_IF_ERROR(Adopt(expr, std::move(value)));
        value = std::move(expr);
      } else if (TakeOperator("[")) {
        ASSIGN_OR_RETURN(value, Subscript(std::move(value)));
      } else if (TakeOperator("(")) {
        Expr expr = Make(Expr::Kind::kCall);
        RETURN_IF_ERROR(Adopt(expr, std::move(value)));
        RETURN_IF_ERROR(Arguments(expr));
        value = std::move(expr);
      } else {
        return value;
      }
    }
  }

  // Behind the '[': an index, or begin:end:step.
  ExprOr Subscript(Expr value) {
    Expr expr = Make(Expr::Kind::kSubscript);
    RETURN_IF_ERROR(Adopt(expr, std::move(value)));
    if (!IsOperator(":")) {
      ASSIGN_OR_RETURN(Expr index, Expression());
      RETURN_IF_ERROR(Adopt(expr, std::move(index)));
      if (TakeOperator("]")) return expr;
    } else {
      RETURN_IF_ERROR(Adopt(expr, Make(Expr::Kind::kNone)));
    }
    expr.kind = Expr::Kind::kSlice;
    for (int i = 0; i < 2 && TakeOperator(":"); ++i) {  // the end, the step
      if (IsOperator(":") || IsOperator("]")) {
        RETURN_IF_ERROR(Adopt(expr, Make(Expr::Kind::kNone)));
        continue;
      }
      ASSIGN_OR_RETURN(Expr bound, Expression());
      RETURN_IF_ERROR(Adopt(expr, std::move(bound)));
    }
    RETURN_IF_ERROR(Expect("]"));
    return expr;
  }

  // Behind the '('; appends to expr.args.
  absl::Status Arguments(Expr& expr) {
    while (!TakeOperator(")")) {
      const Token& after = tokens_[at_ + 1];
      if (Next().kind == Token::Kind::kName && after.kind == Token::Kind::kOperator &&
          after.text == "=") {
        std::string name = Next().text;
        at_ += 2;
        ASSIGN_OR_RETURN(Expr value, Expression());
        expr.height = std::max(expr.height, value.height + 1);
        expr.keywords.push_back(std::move(name));
        expr.keyword_args.push_back(std::move(value));
      } else {
        ASSIGN_OR_RETURN(Expr value, Expression());
        RETURN_IF_ERROR(Adopt(expr, std::move(value)));
      }
      if (!TakeOperator(",") && !IsOperator(")")) return Unexpected("',' or ')'");
    }
    return absl::OkStatus();
  }

  ExprOr Primary() {
    const Token& token = Next();
    if (token.kind == Token::Kind::kString || token.kind == Token::Kind::kInt) {
      Expr expr = Make(token.kind == Token::Kind::kInt ? Expr::Kind::kInt : Expr::Kind::kString,
                       token.text);
      expr.number = token.number;
      ++at_;
      return expr;
    }
    if (token.kind == Token::Kind::kName) return Name();
    if (TakeOperator("(")) {
      ASSIGN_OR_RETURN(Expr inner, Expression());
      if (IsOperator(",")) return Error(Next().line, "tuples are not supported; lists are");
      RETURN_IF_ERROR(Expect(")"));
      return inner;
    }
    if (TakeOperator("[")) return Items(Expr::Kind::kList, "]");
    if (TakeOperator("{")) return Items(Expr::Kind::kDict, "}");
    return Unexpected("a value");
  }

  ExprOr Name() {
    const std::string& name = tokens_[at_++].text;
    if (name == "none" || name == "None") return Make(Expr::Kind::kNone);
    const bool is_true = name == "true" || name == "True";
    if (is_true || name == "false" || name == "False") {
      Expr expr = Make(Expr::Kind::kBool);
      expr.number = is_true ? 1 : 0;
      return expr;
    }
    return Make(Expr::Kind::kName, name);
  }

  ExprOr Items(Expr::Kind kind, std::string_view end) {
    Expr expr = Make(kind);
    while (!TakeOperator(end)) {
      ASSIGN_OR_RETURN(Expr item, Expression());
      RETURN_IF_ERROR(Adopt(expr, std::move(item)));
      if (kind == Expr::Kind::kDict) {
        RETURN_IF_ERROR(Expect(":"));
        ASSIGN_OR_RETURN(Expr value, Expression());
        RETURN_IF_ERROR(Adopt(expr, std::move(value)));
      }
      if (!TakeOperator(",") && !IsOperator(end)) {
        return Unexpected(fmt::format("',' or '{}'", end));
      }
    }
    return expr;
  }

  std::vector<Token> tokens_;
  std::size_t at_ = 0;
  int depth_ = 0;
};

}  // namespace

absl::StatusOr<std::vector<Node>> Parse(std::string_view source) {
  ASSIGN_OR_RETURN(std::vector<Token> tokens, Tokenize(source));
  return Parser(std::move(tokens)).Run();
}

}  // namespace weft::jinja
