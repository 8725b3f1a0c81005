#pragma once

#include <memory>
#include <string>

#include "absl/status/statusor.h"
#include "ucp/api/ucp.h"
#include "worker/group/fabric.h"

namespace weft {

struct UcpContextDeleter {
  void operator()(ucp_context_h context) const { ucp_cleanup(context); }
};
using UcpContext = std::unique_ptr<ucp_context, UcpContextDeleter>;

struct UcpWorkerDeleter {
  void operator()(ucp_worker_h worker) const { ucp_worker_destroy(worker); }
};
using UcpWorker = std::unique_ptr<ucp_worker, UcpWorkerDeleter>;

// A context for active messages and sleeping, with the settings that ucx_context.cc explains; a
// variable UCX_* that the user set wins. UCX's own log lines go to our log from now on.
// UNAVAILABLE with what UCX said.
absl::StatusOr<UcpContext> MakeUcpContext(UcxReach reach);
absl::StatusOr<UcpWorker> MakeUcpWorker(ucp_context_h context);

// UNAVAILABLE: `what`, UCX's name for `status`, and what it logged last on this thread.
absl::Status UcxError(const char* what, ucs_status_t status);

}  // namespace weft
