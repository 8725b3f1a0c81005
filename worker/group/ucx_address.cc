#include "worker/group/ucx_address.h"

#include <sys/stat.h>
#include <sys/syscall.h>
#include <unistd.h>

#include <cstring>
#include <fstream>

#include "fmt/format.h"

namespace weft {
namespace {

struct Header {
  std::uint32_t magic;
  std::uint32_t ucx_bytes;
  std::uint64_t checksum;  // of all that follows
  ProcessPlace place;
  std::uint64_t key;
};
constexpr std::uint32_t kMagic = 0x42544657;  // "WFTB"
constexpr std::size_t kMaxAddressBytes = 4096;

std::uint64_t Checksum(std::string_view bytes) {  // FNV-1a
  std::uint64_t hash = 0xcbf29ce484222325;
  for (const char c : bytes) hash = (hash ^ static_cast<unsigned char>(c)) * 0x100000001b3;
  return hash;
}

std::uint64_t ChecksumOf(const ProcessPlace& place, std::uint64_t key, std::string_view ucx) {
  std::string bytes(reinterpret_cast<const char*>(&place), sizeof(place));
  bytes.append(reinterpret_cast<const char*>(&key), sizeof(key));
  bytes += ucx;
  return Checksum(bytes);
}

std::uint64_t NamespaceId(const char* path) {
  struct stat info = {};
  return stat(path, &info) == 0 ? info.st_ino : 0;
}

}  // namespace

ProcessPlace OwnPlace() {
  std::string boot;
  std::ifstream("/proc/sys/kernel/random/boot_id") >> boot;
  return {.shared_memory = Checksum(fmt::format("{} {}", boot, NamespaceId("/proc/self/ns/ipc"))),
          .network = NamespaceId("/proc/self/ns/net"),
          .processes = NamespaceId("/proc/self/ns/pid"),
          .host = Checksum(boot),
          .pid = getpid()};
}

bool CanWake(const ProcessPlace& a, const ProcessPlace& b) {
  return a.shared_memory != b.shared_memory || a.network == b.network;
}

int WatchProcess(const ProcessPlace& place) {
  const ProcessPlace own = OwnPlace();
  if (place.host != own.host || place.processes != own.processes || place.pid == own.pid) return -1;
  // glibc's pidfd_open() is declared without extern "C".
  return static_cast<int>(syscall(SYS_pidfd_open, static_cast<pid_t>(place.pid), 0));
}

std::string EncodeFabricAddress(const FabricAddress& address) {
  const Header header = {.magic = kMagic,
                         .ucx_bytes = static_cast<std::uint32_t>(address.ucx.size()),
                         .checksum = ChecksumOf(address.place, address.key, address.ucx),
                         .place = address.place,
                         .key = address.key};
  std::string text(reinterpret_cast<const char*>(&header), sizeof(header));
  text += address.ucx;
  return text;
}

absl::StatusOr<FabricAddress> DecodeFabricAddress(std::string_view text) {
  Header header;
  if (text.size() < sizeof(header) || text.size() > kMaxAddressBytes) {
    return absl::InvalidArgumentError(
        fmt::format("a fabric address of {} bytes; they have {} to {}", text.size(), sizeof(header),
                    kMaxAddressBytes));
  }
  std::memcpy(&header, text.data(), sizeof(header));
  const std::string_view ucx = text.substr(sizeof(header));
  if (header.magic != kMagic || header.ucx_bytes != ucx.size() ||
      header.checksum != ChecksumOf(header.place, header.key, ucx)) {
    return absl::InvalidArgumentError("not the address of a UCX fabric, or a damaged one");
  }
  return FabricAddress{.place = header.place, .ucx = ucx, .key = header.key};
}

}  // namespace weft
