#include "server/base/log.h"

#include <memory>
#include <string>

#include "spdlog/sinks/stdout_sinks.h"

namespace weft {

void InitLog(std::string_view process_name, std::string_view level) {
  auto sink = std::make_shared<spdlog::sinks::stderr_sink_mt>();
  auto logger = std::make_shared<spdlog::logger>(std::string(process_name), std::move(sink));
  logger->set_pattern("%Y-%m-%d %H:%M:%S.%e %L %n: %v");
  logger->set_level(spdlog::level::from_str(std::string(level)));
  logger->flush_on(spdlog::level::info);
  spdlog::set_default_logger(std::move(logger));
}

}  // namespace weft
