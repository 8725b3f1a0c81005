# What both builds of the CUDA backend compile: nvcc's and the emulation's.
set(WEFT_CUDA_SOURCES attention.cu attention_gqa.cu attention_mla.cu elementwise.cu filtered_sample.cu grouped_linear.cu gumbel_argmax.cu kv_append.cu kv_copy.cu linear.cu lse_merge.cu moe.cu)
set(WEFT_CUDA_HOST_SOURCES device.cc matmul.cc memory.cc nccl.cc stream.cc)
