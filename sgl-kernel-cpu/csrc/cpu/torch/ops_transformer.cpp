// Ops on rows between the products: norms, SwiGLU's gate, the token table, columns side by side,
// the router. They check the arguments, allocate the output and split rows over threads.
#include <cstring>
#include <memory>
#include <optional>
#include <tuple>
#include <vector>

#include "dispatch/dispatch.h"
#include "dispatch/kernel_table.h"
#include "torch/heads_checks.h"
#include "torch/registration.h"
#include "torch/rows.h"
#include "transformer/embedding.h"

namespace sgl_kernel {
namespace {

const KernelTable& kernels() {
  return kernel_table(active_tier());
}

void run_rms_norm(const RmsNormArgs& args) {
  const auto kernel = kernels().rms_norm;
  const int64_t bytes = scratch_bytes<RmsNormScratch>(args);
  run_step(args.rows, row_grain(args.columns),
           [kernel, args, bytes](TaskRange rows) { kernel(args, rows, row_scratch(bytes)); });
}

// Rows of a slab: of the input, of the output, and of the residual if there is one.
void run_norm_slab(RmsNormArgs args, const RowSlab& slab) {
  args.rows = slab.count();
  args.group_rows = slab.rows;
  args.input = element_at(args.input, args.input_dtype, slab.offsets[0]);
  args.input_group_stride = slab.group_strides[0];
  args.input_row_stride = slab.row_strides[0];
  args.out = element_at(args.out, args.out_dtype, slab.offsets[1]);
  args.out_group_stride = slab.group_strides[1];
  args.out_row_stride = slab.row_strides[1];
  if (args.residual != nullptr) {
    args.residual = element_at(args.residual, args.residual_dtype, slab.offsets[2]);
    args.residual_group_stride = slab.group_strides[2];
    args.residual_row_stride = slab.row_strides[2];
  }
  run_rms_norm(args);
}

// Input and weight, checked; the rows come in slabs.
RmsNormArgs norm_args(const Checker& check, const Tensor& input, const Tensor& weight, double eps) {
  check_float_dtype(check, input, "input");
  check.least_rank(input, "input", 1, "[..., N]");
  const int64_t last = input.dim() - 1;
  check.positive(input, "input", last, "N");
  check.unit_last_stride(input, "input");
  set_weight(check, weight, "weight", input.size(last), "N of input");
  RmsNormArgs args;
  args.columns = input.size(last);
  args.eps = check.number(eps, "eps", NumberRange::not_negative);
  args.input = input.const_data_ptr();
  args.input_dtype = to_dtype(input.scalar_type());
  args.weight = weight.const_data_ptr();
  args.weight_dtype = to_dtype(weight.scalar_type());
  return args;
}

void set_norm_out(const Tensor& out, RmsNormArgs* args) {
  args->out = out.mutable_data_ptr();
  args->out_dtype = to_dtype(out.scalar_type());
}

Tensor rmsnorm_cpu(const Tensor& input, const Tensor& weight, double eps,
                   std::optional<ScalarType> out_dtype) {
  const Checker check("rmsnorm_cpu");
  RmsNormArgs args = norm_args(check, input, weight, eps);
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check_float_out_dtype(check, dtype);
  Tensor out = new_output(input, input.sizes(), dtype);
  set_norm_out(out, &args);
  RowDims({input, out}, input.dim() - 1).for_each_slab(2, [&](const RowSlab& slab) {
    run_norm_slab(args, slab);
  });
  return out;
}

// input + residual into the residual; what follows is the norm of the sum.
RmsNormArgs add_norm_args(const Checker& check, const Tensor& input, const Tensor& residual,
                          const Tensor& weight, double eps) {
  RmsNormArgs args = norm_args(check, input, weight, eps);
  check_float_dtype(check, residual, "residual");
  check.same_rows(residual, "residual", input, "input");
  check.size(residual, "residual", input.dim() - 1, args.columns, "N of input");
  check.unit_last_stride(residual, "residual");
  args.residual = residual.mutable_data_ptr();
  args.residual_dtype = to_dtype(residual.scalar_type());
  return args;
}

void run_add_norm(RmsNormArgs args, const Tensor& input, const Tensor& residual,
                  const Tensor& out) {
  set_norm_out(out, &args);
  RowDims({input, out, residual}, input.dim() - 1).for_each_slab(2, [&](const RowSlab& slab) {
    run_norm_slab(args, slab);
  });
}

void fused_add_rmsnorm_cpu(Tensor input, Tensor residual, const Tensor& weight, double eps) {
  const Checker check("fused_add_rmsnorm_cpu");
  const RmsNormArgs args = add_norm_args(check, input, residual, weight, eps);
  MemoryUse memory;
  memory.writes(input, "input");
  memory.writes(residual, "residual");
  memory.reads(weight, "weight");
  memory.check(check);
  run_add_norm(args, input, residual, input);
}

Tensor add_rmsnorm_cpu(const Tensor& input, Tensor residual, const Tensor& weight, double eps,
                       std::optional<ScalarType> out_dtype) {
  const Checker check("add_rmsnorm_cpu");
  const RmsNormArgs args = add_norm_args(check, input, residual, weight, eps);
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check_float_out_dtype(check, dtype);
  MemoryUse memory;
  memory.writes(residual, "residual");
  memory.reads(input, "input");
  memory.reads(weight, "weight");
  memory.check(check);
  Tensor out = new_output(input, input.sizes(), dtype);
  run_add_norm(args, input, residual, out);
  return out;
}

Tensor packed_embedding_cpu(const Tensor& indices, const Tensor& weight, bool is_vnni,
                            std::optional<ScalarType> out_dtype) {
  const Checker check("packed_embedding_cpu");
  check.dense_cpu(weight, "weight");
  check.dtype(weight, "weight", {ScalarType::BFloat16, ScalarType::Half});
  check.rank(weight, "weight", 2, "[N, K]");
  check.contiguous(weight, "weight");
  check.dense_cpu(indices, "indices");
  check.rank(indices, "indices", 1, "[T]");
  const ScalarType dtype = out_dtype.value_or(weight.scalar_type());
  check_float_out_dtype(check, dtype);
  const int64_t tokens = indices.size(0);
  const auto rows = std::make_shared<Indices>(
      check, indices, "indices", IndexRange{tokens, "T", weight.size(0), "rows of weight"});
  EmbeddingArgs args;
  args.rows = rows->data();
  args.N = weight.size(0);
  args.K = weight.size(1);
  args.table = weight.const_data_ptr();
  args.table_dtype = to_dtype(weight.scalar_type());
  args.is_vnni = is_vnni;
  const int64_t shape[2] = {tokens, args.K};
  Tensor out = new_output(weight, {shape, 2}, dtype);
  args.out = out.mutable_data_ptr();
  args.out_dtype = to_dtype(dtype);
  run_step(
      tokens, row_grain(args.K),
      [rows, tokens] {
        rows->refresh();
        return tokens;
      },
      [args](TaskRange tokens) { embed_rows(args, tokens); });
  return out;
}

Tensor silu_and_mul_cpu(const Tensor& input, std::optional<ScalarType> out_dtype) {
  const Checker check("silu_and_mul_cpu");
  check_float_dtype(check, input, "input");
  check.least_rank(input, "input", 1, "[..., 2 N]");
  const int64_t last = input.dim() - 1;
  check.unit_last_stride(input, "input");
  if (input.size(last) % 2 != 0) {
    check.fail("input", "an even size in dimension " + std::to_string(last), input.size(last),
               " in shape ", shape_name(input));
  }
  const ScalarType dtype = out_dtype.value_or(input.scalar_type());
  check_float_out_dtype(check, dtype);

  SiluAndMulArgs args;
  args.columns = input.size(last) / 2;
  args.input_dtype = to_dtype(input.scalar_type());
  args.out_dtype = to_dtype(dtype);
  const std::vector<int64_t> shape = sizes_with_last(input, args.columns);
  Tensor out = new_output(input, {shape.data(), shape.size()}, dtype);
  const void* rows = input.const_data_ptr();
  void* out_rows = out.mutable_data_ptr();
  const auto kernel = kernels().silu_and_mul;
  RowDims({input, out}, last).for_each_slab(1, [&](const RowSlab& slab) {
    args.rows = slab.rows;
    args.input = element_at(rows, args.input_dtype, slab.offsets[0]);
    args.input_stride = slab.row_strides[0];
    args.out = element_at(out_rows, args.out_dtype, slab.offsets[1]);
    run_step(args.rows, row_grain(4 * args.columns),
             [kernel, args](TaskRange rows) { kernel(args, rows); });
  });
  return out;
}

std::tuple<Tensor, Tensor> topk_softmax_cpu(const Tensor& hidden_states,
                                            const Tensor& gating_output, int64_t topk,
                                            bool renormalize,
                                            const std::optional<Tensor>& correction_bias) {
  const Checker check("topk_softmax_cpu");
  check_float_dtype(check, gating_output, "gating_output");
  check.rank(gating_output, "gating_output", 2, "[M, experts]");
  check.unit_last_stride(gating_output, "gating_output");
  check.dense_cpu(hidden_states, "hidden_states");
  check.rank(hidden_states, "hidden_states", 2, "[M, K]");
  check.size(hidden_states, "hidden_states", 0, gating_output.size(0), "M of gating_output");
  if (gating_output.size(1) > kMostExperts) {
    check.fail("gating_output", "at most " + std::to_string(kMostExperts) + " experts",
               gating_output.size(1));
  }
  if (topk < 1 || topk > gating_output.size(1)) {
    check.fail("topk", "1 to the number of experts, " + std::to_string(gating_output.size(1)),
               topk);
  }
  TopkSoftmaxArgs args;
  args.rows = gating_output.size(0);
  args.experts = gating_output.size(1);
  args.topk = topk;
  args.renormalize = renormalize;
  args.gating = gating_output.const_data_ptr();
  args.gating_dtype = to_dtype(gating_output.scalar_type());
  args.gating_stride = gating_output.stride(0);
  if (correction_bias.has_value()) {
    check_float_dtype(check, *correction_bias, "correction_bias");
    check.rank(*correction_bias, "correction_bias", 1, "[experts]");
    check.size(*correction_bias, "correction_bias", 0, args.experts, "experts of gating_output");
    check.contiguous(*correction_bias, "correction_bias");
    args.bias = correction_bias->const_data_ptr();
    args.bias_dtype = to_dtype(correction_bias->scalar_type());
  }
  const int64_t shape[2] = {args.rows, topk};
  Tensor weights = new_output(gating_output, {shape, 2}, ScalarType::Float);
  Tensor ids = new_output(gating_output, {shape, 2}, ScalarType::Int);
  args.weights = static_cast<float*>(weights.mutable_data_ptr());
  args.ids = static_cast<int32_t*>(ids.mutable_data_ptr());
  const auto kernel = kernels().topk_softmax;
  const int64_t bytes = scratch_bytes<TopkSoftmaxScratch>(args);
  run_step(args.rows, row_grain(args.experts * (4 + topk)),
           [kernel, args, bytes](TaskRange rows) { kernel(args, rows, row_scratch(bytes)); });
  return {weights, ids};
}

// A thread should copy at least this many bytes; starting one costs a few microseconds.
constexpr int64_t kMinBytesPerThread = int64_t{1} << 17;

struct Part {
  const char* data;
  int64_t row_stride;  // bytes from row to row
  int64_t row_bytes;
  int64_t offset;  // bytes of the parts before it in a row of the result
};

Tensor concat_columns_cpu(const Tensor& first, const Tensor& second,
                          const std::optional<Tensor>& third) {
  const Checker check("concat_columns_cpu");
  std::vector<Tensor> parts = {first, second};
  if (third.has_value()) parts.push_back(*third);
  constexpr const char* kNames[] = {"first", "second", "third"};
  int64_t columns = 0;
  for (size_t i = 0; i < parts.size(); ++i) {
    const Tensor& part = parts[i];
    check_float_dtype(check, part, kNames[i]);
    check.dtype(part, kNames[i], {first.scalar_type()});
    check.rank(part, kNames[i], 2, "[M, N]");
    check.size(part, kNames[i], 0, first.size(0), "M of first");
    check.unit_last_stride(part, kNames[i]);
    columns += part.size(1);
  }
  const int64_t rows = first.size(0);
  const int64_t shape[2] = {rows, columns};
  Tensor out = new_output(first, {shape, 2}, first.scalar_type());
  const int64_t element = static_cast<int64_t>(out.element_size());
  std::vector<Part> sources;
  int64_t offset = 0;
  for (const Tensor& part : parts) {
    const int64_t bytes = part.size(1) * element;
    if (bytes > 0) {
      sources.push_back({static_cast<const char*>(part.const_data_ptr()), part.stride(0) * element,
                         bytes, offset});
    }
    offset += bytes;
  }
  char* target = static_cast<char*>(out.mutable_data_ptr());
  const int64_t row_bytes = columns * element;
  run_step(rows, max_i64(1, kMinBytesPerThread / max_i64(1, row_bytes)),
           [sources, target, row_bytes](TaskRange tasks) {
             for (int64_t row = tasks.begin; row < tasks.end; ++row) {
               for (const Part& part : sources) {
                 std::memcpy(target + row * row_bytes + part.offset,
                             part.data + row * part.row_stride,
                             static_cast<size_t>(part.row_bytes));
               }
             }
           });
  return out;
}

const RegisteredOp kOps[] = {
    SGL_OP(packed_embedding_cpu,
           "(Tensor indices, Tensor weight, bool is_vnni, ScalarType? out_dtype=None) -> Tensor"),
    SGL_OP(rmsnorm_cpu,
           "(Tensor input, Tensor weight, float eps, ScalarType? out_dtype=None) -> Tensor"),
    SGL_OP(fused_add_rmsnorm_cpu,
           "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps) -> ()"),
    SGL_OP(add_rmsnorm_cpu,
           "(Tensor input, Tensor(a!) residual, Tensor weight, float eps, ScalarType? "
           "out_dtype=None) -> Tensor"),
    SGL_OP(silu_and_mul_cpu, "(Tensor input, ScalarType? out_dtype=None) -> Tensor"),
    SGL_OP(topk_softmax_cpu,
           "(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, Tensor? "
           "correction_bias=None) -> (Tensor, Tensor)"),
    SGL_OP(concat_columns_cpu, "(Tensor first, Tensor second, Tensor? third=None) -> Tensor"),
};

}  // namespace
}  // namespace sgl_kernel

SGL_REGISTER_OPS(sgl_kernel::kOps)
