#include "kernels/cuda/emu/cublaslt.h"

#include <algorithm>
#include <cstring>

#include "kernels/cpu/convert.h"

namespace weft::cuda_emu {

struct LtHandle {};
struct LtOperation {
  cublasOperation_t transpose_a = CUBLAS_OP_N;
  cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_DEFAULT;
  const float* bias = nullptr;
};
struct LtLayout {  // of columns
  cudaDataType_t type;
  std::int64_t rows;
  std::int64_t cols;
  std::int64_t stride;

  std::int64_t ValueBytes() const { return type == CUDA_R_32F ? 4 : 2; }
  std::int64_t Bytes() const { return ((cols - 1) * stride + rows) * ValueBytes(); }
};
struct LtPreference {
  std::uint32_t alignment[4] = {256, 256, 256, 256};
};

namespace {

float Load(const void* data, std::int64_t index, cudaDataType_t type) {
  if (type == CUDA_R_32F) return static_cast<const float*>(data)[index];
  const std::uint16_t bits = static_cast<const std::uint16_t*>(data)[index];
  return type == CUDA_R_16F ? weft::kernels::F16ToFloat(bits) : weft::kernels::Bf16ToFloat(bits);
}

// C and D are of one layout, as all of Weft's are.
struct Product {
  LtOperation operation;
  LtLayout a, b, d;
  const void* a_data;
  const void* b_data;
  const float* c_data;
  float* d_data;
  float alpha;
  float beta;

  bool Fits() const {
    return operation.transpose_a == CUBLAS_OP_T && a.rows == b.rows && a.cols == d.rows &&
           b.cols == d.cols && a.type == b.type && d.type == CUDA_R_32F && a.stride >= a.rows &&
           b.stride >= b.rows && d.stride >= d.rows;
  }
  bool InDeviceMemory() const {
    if (operation.epilogue == CUBLASLT_EPILOGUE_BIAS &&
        !IsDeviceMemory(operation.bias, static_cast<std::size_t>(d.rows) * sizeof(float))) {
      return false;
    }
    return IsDeviceMemory(a_data, static_cast<std::size_t>(a.Bytes())) &&
           IsDeviceMemory(b_data, static_cast<std::size_t>(b.Bytes())) &&
           IsDeviceMemory(c_data, static_cast<std::size_t>(d.Bytes())) &&
           IsDeviceMemory(d_data, static_cast<std::size_t>(d.Bytes()));
  }

  void Run() const {
    for (std::int64_t row = 0; row < d.cols; ++row) {
      for (std::int64_t out = 0; out < d.rows; ++out) {
        float sum = 0.0F;
        for (std::int64_t i = 0; i < a.rows; ++i) {
          sum +=
              Load(a_data, out * a.stride + i, a.type) * Load(b_data, row * b.stride + i, b.type);
        }
        const std::int64_t at = row * d.stride + out;
        float value = alpha * sum;
        if (beta != 0.0F) value += beta * c_data[at];
        if (operation.epilogue == CUBLASLT_EPILOGUE_BIAS) value += operation.bias[out];
        d_data[at] = value;
      }
    }
  }
};

}  // namespace
}  // namespace weft::cuda_emu

using namespace weft::cuda_emu;  // what follows is C in the original

cublasStatus_t cublasLtCreate(cublasLtHandle_t* handle) {
  *handle = new LtHandle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtDestroy(cublasLtHandle_t handle) {
  delete handle;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescCreate(cublasLtMatmulDesc_t* operation,
                                        cublasComputeType_t /*compute*/, cudaDataType_t scale) {
  if (scale != CUDA_R_32F) return CUBLAS_STATUS_NOT_SUPPORTED;
  *operation = new LtOperation;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulDescSetAttribute(cublasLtMatmulDesc_t operation,
                                              cublasLtMatmulDescAttributes_t attribute,
                                              const void* value, std::size_t bytes) {
  const auto take = [&](auto& field) {
    if (bytes != sizeof(field)) return CUBLAS_STATUS_INVALID_VALUE;
    std::memcpy(&field, value, bytes);
    return CUBLAS_STATUS_SUCCESS;
  };
  switch (attribute) {
    case CUBLASLT_MATMUL_DESC_TRANSA:
      return take(operation->transpose_a);
    case CUBLASLT_MATMUL_DESC_EPILOGUE:
      return take(operation->epilogue);
    case CUBLASLT_MATMUL_DESC_BIAS_POINTER:
      return take(operation->bias);
  }
  return CUBLAS_STATUS_NOT_SUPPORTED;
}

cublasStatus_t cublasLtMatmulDescDestroy(cublasLtMatmulDesc_t operation) {
  delete operation;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutCreate(cublasLtMatrixLayout_t* layout, cudaDataType_t type,
                                          std::uint64_t rows, std::uint64_t cols,
                                          std::int64_t stride) {
  *layout =
      new LtLayout{type, static_cast<std::int64_t>(rows), static_cast<std::int64_t>(cols), stride};
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatrixLayoutDestroy(cublasLtMatrixLayout_t layout) {
  delete layout;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceCreate(cublasLtMatmulPreference_t* preference) {
  *preference = new LtPreference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceSetAttribute(cublasLtMatmulPreference_t preference,
                                                    cublasLtMatmulPreferenceAttributes_t attribute,
                                                    const void* value, std::size_t bytes) {
  if (attribute == CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES) {
    return bytes == sizeof(std::uint64_t) ? CUBLAS_STATUS_SUCCESS : CUBLAS_STATUS_INVALID_VALUE;
  }
  if (bytes != sizeof(std::uint32_t)) return CUBLAS_STATUS_INVALID_VALUE;
  std::memcpy(&preference->alignment[attribute - CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES], value,
              bytes);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulPreferenceDestroy(cublasLtMatmulPreference_t preference) {
  delete preference;
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmulAlgoGetHeuristic(
    cublasLtHandle_t /*handle*/, cublasLtMatmulDesc_t /*operation*/, cublasLtMatrixLayout_t /*a*/,
    cublasLtMatrixLayout_t /*b*/, cublasLtMatrixLayout_t /*c*/, cublasLtMatrixLayout_t /*d*/,
    cublasLtMatmulPreference_t preference, int wanted, cublasLtMatmulHeuristicResult_t* results,
    int* found) {
  *found = std::min(wanted, 1);
  if (*found > 0) std::copy_n(preference->alignment, 4, results->algo.alignment);
  return CUBLAS_STATUS_SUCCESS;
}

cublasStatus_t cublasLtMatmul(cublasLtHandle_t /*handle*/, cublasLtMatmulDesc_t operation,
                              const void* alpha, const void* a, cublasLtMatrixLayout_t a_layout,
                              const void* b, cublasLtMatrixLayout_t b_layout, const void* beta,
                              const void* c, cublasLtMatrixLayout_t c_layout, void* d,
                              cublasLtMatrixLayout_t d_layout,
                              const cublasLtMatmulAlgo_t* algorithm, void* /*workspace*/,
                              std::size_t /*workspace_bytes*/, cudaStream_t stream) {
  const Product product = {.operation = *operation,
                           .a = *a_layout,
                           .b = *b_layout,
                           .d = *d_layout,
                           .a_data = a,
                           .b_data = b,
                           .c_data = static_cast<const float*>(c),
                           .d_data = static_cast<float*>(d),
                           .alpha = *static_cast<const float*>(alpha),
                           .beta = *static_cast<const float*>(beta)};
  if (c_layout != d_layout || !product.Fits()) return CUBLAS_STATUS_INVALID_VALUE;
  const void* const data[] = {a, b, c, d};
  for (int i = 0; i < 4; ++i) {
    if (reinterpret_cast<std::uintptr_t>(data[i]) % algorithm->alignment[i] != 0)
      return CUBLAS_STATUS_INVALID_VALUE;
  }
  if (!product.InDeviceMemory()) return CUBLAS_STATUS_INVALID_VALUE;
  Enqueue(stream, [product] {
    CountLaunch();
    product.Run();
    return cudaSuccess;
  });
  return CUBLAS_STATUS_SUCCESS;
}
