#include "kernels/device/cuda_module.h"

#include <dlfcn.h>

#include <filesystem>
#include <string>
#include <system_error>

#include "fmt/format.h"
#include "kernels/cuda/module.h"
#include "server/base/status_macros.h"

namespace weft::kernels {
namespace {

absl::StatusOr<void*> Load(const std::string& name) {
  std::error_code error;
  const std::filesystem::path here =
      std::filesystem::read_symlink("/proc/self/exe", error).parent_path();
  for (const std::filesystem::path& path : {here / name, here / "../lib/weft" / name}) {
    if (!std::filesystem::exists(path, error)) continue;
    if (void* module = dlopen(path.c_str(), RTLD_NOW | RTLD_LOCAL)) return module;
    return absl::UnimplementedError(fmt::format("cannot load {}: {}", path.string(), dlerror()));
  }
  if (void* module = dlopen(name.c_str(), RTLD_NOW | RTLD_LOCAL)) return module;
  return absl::UnimplementedError(
      fmt::format("this build has no {}, which computes on that device: {}", name, dlerror()));
}

}  // namespace

absl::StatusOr<std::unique_ptr<DeviceStream>> OpenCudaDevice(CudaModule module, int index,
                                                             CpuStream& host) {
  const std::string name = module == CudaModule::kCuda ? "libweft_cuda.so" : "libweft_cuda_emu.so";
  ASSIGN_OR_RETURN(void* loaded, Load(name));
  const auto version = reinterpret_cast<decltype(&weft_device_module_version)>(
      dlsym(loaded, "weft_device_module_version"));
  const auto open =
      reinterpret_cast<decltype(&weft_open_device)>(dlsym(loaded, "weft_open_device"));
  if (version == nullptr || open == nullptr || version() != kDeviceModuleVersion) {
    return absl::UnimplementedError(
        fmt::format("{} is of another build than this program, which wants version {}", name,
                    kDeviceModuleVersion));
  }
  OpenedDevice opened = absl::UnknownError("not opened");
  open(index, &host, &opened);
  return opened;
}

}  // namespace weft::kernels
