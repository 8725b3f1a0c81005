# What both builds of the CUDA backend compile: nvcc's and the emulation's.
set(WEFT_CUDA_SOURCES elementwise.cu)
set(WEFT_CUDA_HOST_SOURCES stream.cc)
