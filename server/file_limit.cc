#include "server/file_limit.h"

#include <sys/resource.h>

#include "fmt/format.h"
#include "server/base/check.h"

namespace weft {

absl::Status RaiseFileLimit(std::int64_t at_least) {
  rlimit limit = {};
  CHECK(getrlimit(RLIMIT_NOFILE, &limit) == 0);
  limit.rlim_cur = limit.rlim_max;
  // Refused only where the hard limit is above the kernel's own: then the soft one stays.
  if (setrlimit(RLIMIT_NOFILE, &limit) != 0) getrlimit(RLIMIT_NOFILE, &limit);
  if (limit.rlim_cur >= static_cast<rlim_t>(at_least)) return absl::OkStatus();
  return absl::FailedPreconditionError(
      fmt::format("the limit of open files is {}; at least {} are needed (ulimit -n)",
                  limit.rlim_cur, at_least));
}

}  // namespace weft
