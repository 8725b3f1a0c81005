#pragma once

#include <utility>

#include "absl/status/status.h"
#include "absl/status/statusor.h"

// Returns the error of `expr` (an absl::Status) to the caller; falls through when it is OK.
#define RETURN_IF_ERROR(expr)                          \
  do {                                                 \
    if (absl::Status s_ = (expr); !s_.ok()) return s_; \
  } while (false)

// `ASSIGN_OR_RETURN(auto x, F());` binds the value of a StatusOr, or returns its error.
#define ASSIGN_OR_RETURN(lhs, expr) \
  WEFT_ASSIGN_OR_RETURN_IMPL_(WEFT_STATUS_CONCAT_(or_, __LINE__), lhs, expr)
#define WEFT_ASSIGN_OR_RETURN_IMPL_(tmp, lhs, expr) \
  auto tmp = (expr);                                \
  if (!tmp.ok()) return tmp.status();               \
  lhs = *std::move(tmp)
#define WEFT_STATUS_CONCAT_(a, b) WEFT_STATUS_CONCAT2_(a, b)
#define WEFT_STATUS_CONCAT2_(a, b) a##b
