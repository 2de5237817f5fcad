// The ops: check the arguments, allocate the output, split the work over threads, call the kernels.
// Built on LibTorch's stable ABI, so one binary serves every Torch from 2.10 on.
#include <optional>
#include <string>
#include <vector>

#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"
#include "gemm/blocking.h"
#include "gemm/bmm.h"
#include "runtime/huge_pages.h"
#include "torch/common.h"
#include "torch/registration.h"
#include "torch/rows.h"

namespace sgl_kernel {
namespace {

struct GemmScratch;
void* gemm_scratch(int64_t bytes) {
  return thread_buffer<GemmScratch>(bytes);
}

// A thread should have at least this many multiply-adds; starting one costs a few microseconds.
constexpr int64_t kMinWorkPerThread = int64_t{1} << 16;

int64_t gemm_grain(const GemmArgs& args) {
  const int64_t work = max_i64(1, rows_per_block(args) * kBlockN * args.K);
  // Each call converts its rows of mat1, which takes as long as a column block of high ones.
  const int64_t least = args.row_block > kMC ? 4 : 1;
  return max_i64(least, kMinWorkPerThread / work);
}

void check_out_dtype(const Checker& check, ScalarType out_dtype, const Tensor& mat1) {
  if (out_dtype != mat1.scalar_type() && out_dtype != ScalarType::Float) {
    check.fail("out_dtype", "mat1's dtype (" + dtype_name(mat1.scalar_type()) + ") or float32",
               dtype_name(out_dtype));
  }
}

// What all products of one weight share. Rows of mat1 come with run_linear; scales and bias are
// checked by the callers.
GemmArgs linear_args(const Checker& check, const Tensor& mat1, const Tensor& mat2,
                     std::initializer_list<ScalarType> weight_dtypes, bool is_vnni,
                     ScalarType out_dtype) {
  check.dense_cpu(mat1, "mat1");
  check.dense_cpu(mat2, "mat2");
  check.dtype(mat1, "mat1", {ScalarType::BFloat16, ScalarType::Half});
  check.dtype(mat2, "mat2", weight_dtypes);
  check.least_rank(mat1, "mat1", 2, "[..., M, K]");
  check.rank(mat2, "mat2", 2, "[N, K]");
  check.positive(mat2, "mat2", 0, "N");
  check.positive(mat2, "mat2", 1, "K");
  check.size(mat1, "mat1", mat1.dim() - 1, mat2.size(1), "K of mat2");
  check.unit_last_stride(mat1, "mat1");
  check.contiguous(mat2, "mat2");
  check_out_dtype(check, out_dtype, mat1);

  GemmArgs args;
  args.N = mat2.size(0);
  args.K = mat2.size(1);
  args.mat1_dtype = to_dtype(mat1.scalar_type());
  args.mat2 = mat2.const_data_ptr();
  args.mat2_dtype = to_dtype(mat2.scalar_type());
  args.is_vnni = is_vnni;
  args.out_dtype = to_dtype(out_dtype);
  return args;
}

void set_bias(const Checker& check, const std::optional<Tensor>& bias, GemmArgs* args) {
  if (!bias.has_value()) return;
  check.dense_cpu(*bias, "bias");
  check.dtype(*bias, "bias", {ScalarType::Float, ScalarType::BFloat16, ScalarType::Half});
  check.rank(*bias, "bias", 1, "[N]");
  check.size(*bias, "bias", 0, args->N, "N of mat2");
  check.contiguous(*bias, "bias");
  args->bias = bias->const_data_ptr();
  args->bias_dtype = to_dtype(bias->scalar_type());
}

void set_scales(const Tensor& scales, int64_t block_n, int64_t block_k, GemmArgs* args) {
  args->scales = static_cast<const float*>(scales.const_data_ptr());
  args->block_n = block_n;
  args->block_k = block_k;
}

// The rows of a slab.
void run_rows(GemmArgs args) {
  const KernelTable* table = &kernel_table(active_tier());
  choose_row_block(*table, torch::stable::get_num_threads(), &args);
  const int64_t scratch_bytes = gemm_scratch_bytes(args);
  // With several blocks of rows a weight is read several times, and not from end to end.
  const bool in_order = row_block_count(args) == 1;
  const Stream weight{static_cast<const char*>(args.mat2),
                      args.N * args.K * dtype_bytes(args.mat2_dtype)};
  run_step(
      gemm_task_count(args), gemm_grain(args),
      [table, args, scratch_bytes](TaskRange tasks) {
        run_gemm(*table, args, tasks, gemm_scratch(scratch_bytes));
      },
      in_order ? weight : Stream{});
}

Tensor run_linear(GemmArgs args, const Tensor& mat1, ScalarType out_dtype) {
  const std::vector<int64_t> shape = sizes_with_last(mat1, args.N);
  Tensor out = new_output(mat1, {shape.data(), shape.size()}, out_dtype);
  const void* rows = mat1.const_data_ptr();
  void* out_rows = out.mutable_data_ptr();
  RowDims({mat1, out}, mat1.dim() - 1).for_each_slab(1, [&](const RowSlab& slab) {
    args.M = slab.rows;
    args.mat1 = element_at(rows, to_dtype(mat1.scalar_type()), slab.offsets[0]);
    args.mat1_stride = slab.row_strides[0];
    args.out = element_at(out_rows, to_dtype(out_dtype), slab.offsets[1]);
    args.out_stride = slab.row_strides[1];
    run_rows(args);
  });
  return out;
}

Tensor fp8_per_tensor_scaled_mm_cpu(const Tensor& mat1, const Tensor& mat2, const Tensor& scales2,
                                    const std::optional<Tensor>& bias, ScalarType out_dtype,
                                    bool is_vnni) {
  const Checker check("fp8_per_tensor_scaled_mm_cpu");
  GemmArgs args = linear_args(check, mat1, mat2, {ScalarType::Float8_e4m3fn}, is_vnni, out_dtype);
  check.dense_cpu(scales2, "scales2");
  check.dtype(scales2, "scales2", {ScalarType::Float});
  if (scales2.numel() != 1) {
    check.fail("scales2", "one element (per-tensor scale)", scales2.numel(), " in shape ",
               shape_name(scales2));
  }
  set_scales(scales2, args.N, args.K, &args);
  set_bias(check, bias, &args);
  return run_linear(args, mat1, out_dtype);
}

Tensor fp8_per_channel_scaled_mm_cpu(const Tensor& mat1, const Tensor& mat2, const Tensor& scales2,
                                     const std::optional<Tensor>& bias, ScalarType out_dtype,
                                     bool is_vnni) {
  const Checker check("fp8_per_channel_scaled_mm_cpu");
  GemmArgs args = linear_args(check, mat1, mat2, {ScalarType::Float8_e4m3fn}, is_vnni, out_dtype);
  check.dense_cpu(scales2, "scales2");
  check.dtype(scales2, "scales2", {ScalarType::Float});
  const bool column = scales2.dim() == 2 && scales2.size(1) == 1;
  if (!(scales2.dim() == 1 || column) || scales2.size(0) != args.N) {
    check.fail("scales2", "shape [N] or [N, 1] with N = " + std::to_string(args.N),
               shape_name(scales2));
  }
  check.contiguous(scales2, "scales2");
  set_scales(scales2, 1, args.K, &args);
  set_bias(check, bias, &args);
  return run_linear(args, mat1, out_dtype);
}

Tensor fp8_scaled_mm_cpu(const Tensor& mat1, const Tensor& mat2, const Tensor& scales2,
                         const std::vector<int64_t>& block_size, const std::optional<Tensor>& bias,
                         ScalarType out_dtype, bool is_vnni) {
  const Checker check("fp8_scaled_mm_cpu");
  GemmArgs args = linear_args(check, mat1, mat2, {ScalarType::Float8_e4m3fn}, is_vnni, out_dtype);
  if (block_size.size() != 2 || block_size[0] < 1 || block_size[1] < 1) {
    std::string got;
    for (const int64_t size : block_size) got += (got.empty() ? "" : ", ") + std::to_string(size);
    check.fail("block_size", "two sizes >= 1: [block_n, block_k]", "[", got, "]");
  }
  const int64_t block_n = block_size[0];
  const int64_t block_k = block_size[1];
  check.dense_cpu(scales2, "scales2");
  check.dtype(scales2, "scales2", {ScalarType::Float});
  // Written so that sizes near 2^63 do not overflow.
  const int64_t rows = (args.N - 1) / block_n + 1;
  const int64_t columns = (args.K - 1) / block_k + 1;
  if (scales2.dim() != 2 || scales2.size(0) != rows || scales2.size(1) != columns) {
    check.fail("scales2",
               "shape [ceil(N / block_n), ceil(K / block_k)] = [" + std::to_string(rows) + ", " +
                   std::to_string(columns) + "]",
               shape_name(scales2));
  }
  check.contiguous(scales2, "scales2");
  set_scales(scales2, min_i64(block_n, args.N), min_i64(block_k, args.K), &args);
  set_bias(check, bias, &args);
  return run_linear(args, mat1, out_dtype);
}

Tensor weight_packed_linear(const Tensor& mat1, const Tensor& mat2,
                            const std::optional<Tensor>& bias, bool is_vnni,
                            std::optional<ScalarType> out_dtype) {
  const Checker check("weight_packed_linear");
  check.dense_cpu(mat1, "mat1");
  const ScalarType dtype = out_dtype.value_or(mat1.scalar_type());
  GemmArgs args =
      linear_args(check, mat1, mat2, {ScalarType::BFloat16, ScalarType::Half}, is_vnni, dtype);
  set_bias(check, bias, &args);
  return run_linear(args, mat1, dtype);
}

void bmm_cpu(Tensor out, const Tensor& mat1, const Tensor& mat2, bool is_vnni,
             const std::optional<Tensor>& scale) {
  const Checker check("bmm_cpu");
  check.dense_cpu(out, "out");
  check.dense_cpu(mat1, "mat1");
  check.dense_cpu(mat2, "mat2");
  check.dtype(mat1, "mat1", {ScalarType::BFloat16, ScalarType::Half});
  check.dtype(mat2, "mat2", {ScalarType::Float8_e4m3fn, ScalarType::BFloat16, ScalarType::Half});
  check.dtype(out, "out", {mat1.scalar_type(), ScalarType::Float});
  check.rank(out, "out", 3, "[B, M, N]");
  check.rank(mat1, "mat1", 3, "[B, M, K]");
  check.rank(mat2, "mat2", 3, "[B, N, K]");
  check.positive(mat2, "mat2", 1, "N");
  check.positive(mat2, "mat2", 2, "K");
  check.size(mat1, "mat1", 0, mat2.size(0), "B of mat2");
  check.size(mat1, "mat1", 2, mat2.size(2), "K of mat2");
  check.size(out, "out", 0, mat2.size(0), "B of mat2");
  check.size(out, "out", 1, mat1.size(1), "M of mat1");
  check.size(out, "out", 2, mat2.size(1), "N of mat2");
  check.unit_last_stride(mat1, "mat1");
  check.unit_last_stride(out, "out");
  check.contiguous(mat2, "mat2");

  BmmArgs args;
  args.batch = mat2.size(0);
  args.mat1_batch_stride = mat1.stride(0);
  args.out_batch_stride = out.stride(0);
  GemmArgs& gemm = args.gemm;
  gemm.M = mat1.size(1);
  gemm.N = mat2.size(1);
  gemm.K = mat2.size(2);
  gemm.mat1 = mat1.const_data_ptr();
  gemm.mat1_stride = mat1.stride(1);
  gemm.mat1_dtype = to_dtype(mat1.scalar_type());
  gemm.mat2 = mat2.const_data_ptr();
  gemm.mat2_dtype = to_dtype(mat2.scalar_type());
  gemm.is_vnni = is_vnni;
  gemm.out = out.mutable_data_ptr();
  gemm.out_stride = out.stride(1);
  gemm.out_dtype = to_dtype(out.scalar_type());

  // A weight without its scale, or a scale that multiplies nothing, is a caller's mistake.
  const bool is_fp8 = gemm.mat2_dtype == DType::e4m3;
  if (is_fp8 && !scale.has_value())
    check.fail("scale", "a float32 tensor for float8_e4m3fn mat2", "None");
  if (!is_fp8 && scale.has_value()) {
    check.fail("scale", "None for " + dtype_name(mat2.scalar_type()) + " mat2", "a tensor");
  }
  if (scale.has_value()) {
    check.dense_cpu(*scale, "scale");
    check.dtype(*scale, "scale", {ScalarType::Float});
    check.contiguous(*scale, "scale");
    if (scale->numel() != 1 && !(scale->dim() == 1 && scale->numel() == args.batch)) {
      check.fail("scale", "one element, or shape [B] with B = " + std::to_string(args.batch),
                 shape_name(*scale));
    }
    set_scales(*scale, gemm.N, gemm.K, &gemm);
    args.scale_batch_stride = scale->numel() == 1 ? 0 : 1;
  }
  MemoryUse memory;
  memory.writes(out, "out");
  memory.reads(mat1, "mat1");
  memory.reads(mat2, "mat2");
  memory.reads(scale, "scale");
  memory.check(check);

  const KernelTable* table = &kernel_table(active_tier());
  choose_row_block(*table, div_up(torch::stable::get_num_threads(), max_i64(1, args.batch)), &gemm);
  const int64_t scratch_bytes = gemm_scratch_bytes(gemm);
  run_step(bmm_task_count(args), gemm_grain(gemm), [table, args, scratch_bytes](TaskRange tasks) {
    run_bmm(*table, args, tasks, gemm_scratch(scratch_bytes));
  });
}

Tensor convert_weight_packed(const Tensor& weight) {
  const Checker check("convert_weight_packed");
  refuse_recording(check);
  check.dense_cpu(weight, "weight");
  check.dtype(weight, "weight",
              {ScalarType::Float8_e4m3fn, ScalarType::BFloat16, ScalarType::Half});
  const int64_t dims = weight.dim();
  if (dims != 2 && dims != 3) {
    check.fail("weight", "[N, K] or [B, N, K]", dims, "-D ", shape_name(weight));
  }
  check.positive(weight, "weight", dims - 2, "N");
  check.positive(weight, "weight", dims - 1, "K");
  const Tensor source = torch::stable::contiguous(weight);

  Tensor packed = new_output(weight, weight.sizes(), weight.scalar_type());
  const int64_t batch = dims == 3 ? weight.size(0) : 1;
  const int64_t N = weight.size(dims - 2);
  const int64_t K = weight.size(dims - 1);
  const int64_t element = static_cast<int64_t>(weight.element_size());
  const int64_t blocks = div_up(N, kBlockN);
  const char* src = static_cast<const char*>(source.const_data_ptr());
  char* dst = static_cast<char*>(packed.mutable_data_ptr());
  // First touched below, by the threads that will read the same blocks in the ops.
  advise_huge_pages(dst, static_cast<size_t>(batch * N * K * element));
  const int64_t grain = max_i64(1, kMinWorkPerThread / (kBlockN * K));
  torch::stable::parallel_for(0, batch * blocks, grain, [&](int64_t begin, int64_t end) {
    for (int64_t task = begin; task < end; ++task) {
      const int64_t offset = task / blocks * N * K * element;
      const int64_t block = task % blocks;
      const PackArgs args{src + offset, dst + offset, element, N, K};
      pack_weight_blocks(args, block, block + 1);
    }
  });
  return packed;
}

const RegisteredOp kOps[] = {
    SGL_OP(convert_weight_packed, "(Tensor weight) -> Tensor"),
    SGL_OP(fp8_scaled_mm_cpu,
           "(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, Tensor? bias, ScalarType "
           "out_dtype, bool is_vnni) -> Tensor"),
    SGL_OP(fp8_per_tensor_scaled_mm_cpu,
           "(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, ScalarType out_dtype, bool "
           "is_vnni) -> Tensor"),
    SGL_OP(fp8_per_channel_scaled_mm_cpu,
           "(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, ScalarType out_dtype, bool "
           "is_vnni) -> Tensor"),
    SGL_OP(weight_packed_linear,
           "(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni, ScalarType? out_dtype=None) -> "
           "Tensor"),
    SGL_OP(bmm_cpu,
           "(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()"),
};

}  // namespace
}  // namespace sgl_kernel

SGL_REGISTER_OPS(sgl_kernel::kOps)
