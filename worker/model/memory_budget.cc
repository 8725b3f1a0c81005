#include "worker/model/memory_budget.h"

#include <algorithm>
#include <fstream>
#include <limits>
#include <string>

namespace weft {
namespace {

// File pages that the cgroup counts but that go when memory is needed.
std::int64_t InactiveFileBytes(const char* stat_path) {
  std::ifstream file(stat_path);
  std::string key;
  std::int64_t value = 0;
  while (file >> key >> value) {
    if (key == "inactive_file" || key == "total_inactive_file") return value;
  }
  return 0;
}

// The number in a one-line file; nothing for "max", an absent file or anything else.
bool ReadNumber(const char* path, std::int64_t& value) {
  std::ifstream file(path);
  return static_cast<bool>(file >> value);
}

std::int64_t MemAvailableBytes() {
  std::ifstream file("/proc/meminfo");
  std::string key;
  std::int64_t kib = 0;
  std::string unit;
  while (file >> key >> kib) {
    if (key == "MemAvailable:") return kib * 1024;
    std::getline(file, unit);
  }
  return std::numeric_limits<std::int64_t>::max();
}

}  // namespace

std::int64_t AvailableMemoryBytes() {
  std::int64_t available = MemAvailableBytes();
  struct Files {
    const char* limit;
    const char* usage;
    const char* stat;
  };
  constexpr Files kCgroups[] = {
      {"/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory.current", "/sys/fs/cgroup/memory.stat"},
      {"/sys/fs/cgroup/memory/memory.limit_in_bytes", "/sys/fs/cgroup/memory/memory.usage_in_bytes",
       "/sys/fs/cgroup/memory/memory.stat"}};
  for (const Files& files : kCgroups) {
    std::int64_t limit = 0;
    std::int64_t usage = 0;
    if (ReadNumber(files.limit, limit) && ReadNumber(files.usage, usage)) {
      available = std::min(
          available, std::max<std::int64_t>(0, limit - usage + InactiveFileBytes(files.stat)));
    }
  }
  return available;
}

}  // namespace weft
