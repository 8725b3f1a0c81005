#include "worker/group/ucx_context.h"

#include <cstdarg>
#include <cstdio>
#include <cstdlib>
#include <memory>
#include <mutex>
#include <string>
#include <string_view>
#include <utility>

#include "absl/types/span.h"
#include "fmt/format.h"
#include "server/base/log.h"
#include "server/base/status_macros.h"

extern "C" {
#include "ucs/debug/log_def.h"
}

namespace weft {
namespace {

thread_local std::string last_ucx_message;

// UCX logs to standard output by default, which belongs to what a command was asked to print. What
// it calls an error is mostly a peer that died: for us a status, reported where it matters.
ucs_log_func_rc_t LogFromUcx(const char* file, unsigned line, const char* /*function*/,
                             ucs_log_level_t level, const ucs_log_component_config_t*,
                             const char* format, va_list args) {
  char text[512];
  std::vsnprintf(text, sizeof(text), format, args);
  // About our settings below, when the user's UCX_TLS leaves out what they are for.
  if (std::string_view(text).starts_with("invalid configuration")) return UCS_LOG_FUNC_RC_STOP;
  if (level <= UCS_LOG_LEVEL_WARN) last_ucx_message = text;
  switch (level) {
    case UCS_LOG_LEVEL_FATAL:
      spdlog::critical("ucx: {} ({}:{})", text, file, line);
      return UCS_LOG_FUNC_RC_CONTINUE;
    case UCS_LOG_LEVEL_ERROR:
    case UCS_LOG_LEVEL_WARN:
      spdlog::warn("ucx: {}", text);
      return UCS_LOG_FUNC_RC_STOP;
    case UCS_LOG_LEVEL_DIAG:
      spdlog::debug("ucx: {}", text);
      return UCS_LOG_FUNC_RC_STOP;
    default:  // The user asked for more: where the user asked for it.
      return UCS_LOG_FUNC_RC_CONTINUE;
  }
}

struct Setting {
  const char* name;      // as ucp_config_modify() knows it
  const char* variable;  // as the user knows it
  const char* value;
};
constexpr Setting kSettings[] = {
    // Without it shared memory refuses endpoints that handle errors, and everything between
    // processes of one host silently goes over TCP.
    {"MM_ERROR_HANDLING", "UCX_MM_ERROR_HANDLING", "y"},
    // How often shared-memory peers are checked for being alive; the default is 20 s.
    {"KEEPALIVE_INTERVAL", "UCX_KEEPALIVE_INTERVAL", "1s"},
    // Or connecting to a host that is gone blocks the thread for minutes.
    {"CONN_NB", "UCX_TCP_CONN_NB", "y"},
    // System V segments are attached and marked for removal within three system calls of being
    // made (about 10 us): from then on the kernel frees them with the last process, however it
    // dies. POSIX ones have a name in /dev/shm while megabytes are written to them (1-2 ms), which
    // a kill -9 leaves behind, and containers bound /dev/shm to 64 MB. What is sent here is never
    // long enough for CMA.
    {"TLS", "UCX_TLS", "^posix,cma"},
};
// For what outlives its peers: nothing that is shared with them, and long frames over TCP, whose
// own are 8 KB (frame_assembler.h; 64 KB ones moved 1.6 times as much through the loopback).
constexpr Setting kBetweenGroups[] = {{"TLS", "UCX_TLS", "^posix,cma,sysv"},
                                      {"TX_SEG_SIZE", "UCX_TCP_TX_SEG_SIZE", "128k"},
                                      {"RX_SEG_SIZE", "UCX_TCP_RX_SEG_SIZE", "128k"}};

// A variable that the user set wins.
absl::Status Apply(absl::Span<const Setting> settings, ucp_config_t* config) {
  for (const Setting& setting : settings) {
    if (std::getenv(setting.variable) != nullptr) continue;
    if (ucs_status_t status = ucp_config_modify(config, setting.name, setting.value);
        status != UCS_OK) {
      return UcxError(setting.name, status);
    }
  }
  return absl::OkStatus();
}

}  // namespace

absl::Status UcxError(const char* what, ucs_status_t status) {
  std::string detail = std::exchange(last_ucx_message, {});
  return absl::UnavailableError(fmt::format("{}: {}{}{}", what, ucs_status_string(status),
                                            detail.empty() ? "" : "; ", detail));
}

absl::StatusOr<UcpContext> MakeUcpContext(UcxReach reach) {
  static std::once_flag log_installed;
  std::call_once(log_installed, [] { ucs_log_push_handler(LogFromUcx); });

  ucp_config_t* raw_config = nullptr;
  if (ucs_status_t status = ucp_config_read(nullptr, nullptr, &raw_config); status != UCS_OK) {
    return UcxError("ucp_config_read", status);
  }
  const std::unique_ptr<ucp_config_t, decltype(&ucp_config_release)> config(raw_config,
                                                                            &ucp_config_release);
  RETURN_IF_ERROR(Apply(kSettings, config.get()));
  if (reach == UcxReach::kBetweenGroups) RETURN_IF_ERROR(Apply(kBetweenGroups, config.get()));
  ucp_params_t params = {};
  params.field_mask = UCP_PARAM_FIELD_FEATURES | UCP_PARAM_FIELD_MT_WORKERS_SHARED;
  params.features = UCP_FEATURE_AM | UCP_FEATURE_WAKEUP;
  params.mt_workers_shared = 0;
  ucp_context_h context = nullptr;
  if (ucs_status_t status = ucp_init(&params, config.get(), &context); status != UCS_OK) {
    return UcxError("ucp_init", status);
  }
  return UcpContext(context);
}

absl::StatusOr<UcpWorker> MakeUcpWorker(ucp_context_h context) {
  ucp_worker_params_t params = {};
  params.field_mask = UCP_WORKER_PARAM_FIELD_THREAD_MODE | UCP_WORKER_PARAM_FIELD_EVENTS |
                      UCP_WORKER_PARAM_FIELD_AM_ALIGNMENT;
  params.thread_mode = UCS_THREAD_MODE_SINGLE;
  params.events = UCP_WAKEUP_TX | UCP_WAKEUP_RX;
  params.am_alignment = 8;
  ucp_worker_h worker = nullptr;
  if (ucs_status_t status = ucp_worker_create(context, &params, &worker); status != UCS_OK) {
    return UcxError("ucp_worker_create", status);
  }
  return UcpWorker(worker);
}

}  // namespace weft
