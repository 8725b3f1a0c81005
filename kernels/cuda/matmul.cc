#include <array>
#include <cstring>
#include <utility>

#ifdef WEFT_CUDA_EMU
#include "kernels/cuda/emu/cublaslt.h"
#else
#include <cublasLt.h>
#endif

#include "absl/container/flat_hash_map.h"
#include "fmt/format.h"
#include "kernels/cuda/linear.h"
#include "kernels/cuda/memory.h"
#include "server/base/check.h"
#include "server/base/status_macros.h"

namespace weft::kernels::cuda {
namespace {

constexpr std::int64_t kWorkspaceBytes = std::int64_t{32} << 20;
// Plans kept, of the shapes seen last: more would be those of prompts of every length.
constexpr std::size_t kMaxPlans = 4096;

absl::Status LtStatus(cublasStatus_t status, const char* what) {
  if (status == CUBLAS_STATUS_SUCCESS) return absl::OkStatus();
  return absl::InternalError(fmt::format("{}: cublasLt status {}", what, static_cast<int>(status)));
}

cudaDataType_t CudaTypeOf(DType dtype) {
  switch (dtype) {
    case DType::kFloat32:
      return CUDA_R_32F;
    case DType::kBFloat16:
      return CUDA_R_16BF;
    case DType::kFloat16:
      return CUDA_R_16F;
  }
  CheckFailed(__FILE__, __LINE__, "dtype", "unreachable");
}

// What a kernel is chosen by.
struct Shape {
  std::int32_t num_rows, in_features, out_features;
  std::int64_t x_stride, y_stride;
  DType dtype;
  bool bias, residual;
  std::array<std::uint32_t, 4> alignment;  // in bytes, of weight, x, residual, y

  friend bool operator==(const Shape&, const Shape&) = default;
  template <typename H>
  friend H AbslHashValue(H h, const Shape& s) {
    return H::combine(std::move(h), s.num_rows, s.in_features, s.out_features, s.x_stride,
                      s.y_stride, s.dtype, s.bias, s.residual, s.alignment);
  }
};

std::uint32_t AlignmentOf(const void* data) {
  const auto address = reinterpret_cast<std::uintptr_t>(data) | 256;
  return static_cast<std::uint32_t>(address & -address);
}

Shape ShapeOf(const MatmulParams& p) {
  const void* residual = p.residual != nullptr ? p.residual : p.y;
  return {.num_rows = p.num_rows,
          .in_features = p.in_features,
          .out_features = p.out_features,
          .x_stride = p.x_stride,
          .y_stride = p.y_stride,
          .dtype = p.dtype,
          .bias = p.bias != nullptr,
          .residual = p.residual != nullptr,
          .alignment = {AlignmentOf(p.weight), AlignmentOf(p.x), AlignmentOf(residual),
                        AlignmentOf(p.y)}};
}

// The library is of columns: y^T [out, rows] = W [out, in] x^T [in, rows], where W is stored as
// [in, out] columns.
struct Plan {
  cublasLtMatmulDesc_t operation = nullptr;
  cublasLtMatrixLayout_t weight = nullptr;
  cublasLtMatrixLayout_t x = nullptr;
  cublasLtMatrixLayout_t y = nullptr;
  cublasLtMatmulAlgo_t algorithm = {};

  Plan() = default;
  Plan(Plan&& other) noexcept { *this = std::move(other); }
  Plan& operator=(Plan&& other) noexcept {
    std::swap(operation, other.operation);
    std::swap(weight, other.weight);
    std::swap(x, other.x);
    std::swap(y, other.y);
    std::swap(algorithm, other.algorithm);
    return *this;
  }
  ~Plan() {
    if (operation != nullptr) cublasLtMatmulDescDestroy(operation);
    for (cublasLtMatrixLayout_t layout : {weight, x, y}) {
      if (layout != nullptr) cublasLtMatrixLayoutDestroy(layout);
    }
  }

  absl::Status Describe(const Shape& s) {
    const cudaDataType_t type = CudaTypeOf(s.dtype);
    RETURN_IF_ERROR(LtStatus(cublasLtMatmulDescCreate(&operation, CUBLAS_COMPUTE_32F, CUDA_R_32F),
                             "operation"));
    const cublasOperation_t transposed = CUBLAS_OP_T;
    RETURN_IF_ERROR(Set(CUBLASLT_MATMUL_DESC_TRANSA, transposed));
    if (s.bias) {
      const cublasLtEpilogue_t epilogue = CUBLASLT_EPILOGUE_BIAS;
      RETURN_IF_ERROR(Set(CUBLASLT_MATMUL_DESC_EPILOGUE, epilogue));
    }
    const auto in = static_cast<std::uint64_t>(s.in_features);
    const auto out = static_cast<std::uint64_t>(s.out_features);
    const auto rows = static_cast<std::uint64_t>(s.num_rows);
    RETURN_IF_ERROR(
        LtStatus(cublasLtMatrixLayoutCreate(&weight, type, in, out, s.in_features), "weight"));
    RETURN_IF_ERROR(LtStatus(cublasLtMatrixLayoutCreate(&x, type, in, rows, s.x_stride), "x"));
    return LtStatus(cublasLtMatrixLayoutCreate(&y, CUDA_R_32F, out, rows, s.y_stride), "y");
  }

  template <typename T>
  absl::Status Set(cublasLtMatmulDescAttributes_t attribute, const T& value) {
    return LtStatus(cublasLtMatmulDescSetAttribute(operation, attribute, &value, sizeof(value)),
                    "cublasLtMatmulDescSetAttribute");
  }

  absl::Status Choose(cublasLtHandle_t handle, const Shape& s) {
    cublasLtMatmulPreference_t preference = nullptr;
    RETURN_IF_ERROR(LtStatus(cublasLtMatmulPreferenceCreate(&preference), "preference"));
    const auto set = [&](cublasLtMatmulPreferenceAttributes_t attribute, const auto& value) {
      cublasLtMatmulPreferenceSetAttribute(preference, attribute, &value, sizeof(value));
    };
    set(CUBLASLT_MATMUL_PREF_MAX_WORKSPACE_BYTES, static_cast<std::uint64_t>(kWorkspaceBytes));
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_A_BYTES, s.alignment[0]);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_B_BYTES, s.alignment[1]);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_C_BYTES, s.alignment[2]);
    set(CUBLASLT_MATMUL_PREF_MIN_ALIGNMENT_D_BYTES, s.alignment[3]);
    cublasLtMatmulHeuristicResult_t result = {};
    int found = 0;
    const cublasStatus_t status = cublasLtMatmulAlgoGetHeuristic(handle, operation, weight, x, y, y,
                                                                 preference, 1, &result, &found);
    cublasLtMatmulPreferenceDestroy(preference);
    RETURN_IF_ERROR(LtStatus(status, "cublasLtMatmulAlgoGetHeuristic"));
    if (found == 0) {
      return absl::InternalError(fmt::format("cublasLt has no product of {} rows, {} x {} {}",
                                             s.num_rows, s.out_features, s.in_features,
                                             DTypeName(s.dtype)));
    }
    algorithm = result.algo;
    return absl::OkStatus();
  }
};

}  // namespace

struct Matmul::Impl {
  cublasLtHandle_t handle = nullptr;
  void* workspace = nullptr;
  absl::flat_hash_map<Shape, Plan> plans;

  Impl() = default;
  Impl(const Impl&) = delete;
  Impl& operator=(const Impl&) = delete;
  ~Impl() {
    plans.clear();
    cudaFree(workspace);
    if (handle != nullptr) cublasLtDestroy(handle);
  }

  absl::StatusOr<Plan*> PlanOf(const Shape& shape) {
    const auto found = plans.find(shape);
    if (found != plans.end()) return &found->second;
    if (plans.size() == kMaxPlans) plans.clear();
    Plan plan;
    RETURN_IF_ERROR(plan.Describe(shape));
    RETURN_IF_ERROR(plan.Choose(handle, shape));
    return &plans.emplace(shape, std::move(plan)).first->second;
  }
};

Matmul::Matmul(std::unique_ptr<Impl> impl) : impl_(std::move(impl)) {}
Matmul::~Matmul() = default;

absl::StatusOr<std::unique_ptr<Matmul>> Matmul::Create() {
  auto impl = std::make_unique<Impl>();
  RETURN_IF_ERROR(LtStatus(cublasLtCreate(&impl->handle), "cublasLtCreate"));
  ASSIGN_OR_RETURN(impl->workspace, AllocateOnDevice(kWorkspaceBytes, "cublasLt's workspace"));
  return std::unique_ptr<Matmul>(new Matmul(std::move(impl)));
}

absl::Status Matmul::Run(const MatmulParams& p, CudaStream& stream) {
  if (p.num_rows == 0) return absl::OkStatus();
  ASSIGN_OR_RETURN(Plan * plan, impl_->PlanOf(ShapeOf(p)));
  if (p.bias != nullptr) {
    RETURN_IF_ERROR(plan->Set(CUBLASLT_MATMUL_DESC_BIAS_POINTER, p.bias));
  }
  const float one = 1.0F;
  const float beta = p.residual != nullptr ? 1.0F : 0.0F;
  const void* residual = p.residual != nullptr ? p.residual : p.y;
  return LtStatus(cublasLtMatmul(impl_->handle, plan->operation, &one, p.weight, plan->weight, p.x,
                                 plan->x, &beta, residual, plan->y, p.y, plan->y, &plan->algorithm,
                                 impl_->workspace, kWorkspaceBytes, stream.handle()),
                  "cublasLtMatmul");
}

}  // namespace weft::kernels::cuda
