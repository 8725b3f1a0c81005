#include "kernels/cuda/module.h"

#include "kernels/cuda/device.h"

int weft_device_module_version() { return weft::kernels::kDeviceModuleVersion; }

void weft_open_device(int index, weft::kernels::CpuStream* host,
                      weft::kernels::OpenedDevice* opened) {
  *opened = weft::kernels::cuda::CudaDevice::Open(index, *host);
}
