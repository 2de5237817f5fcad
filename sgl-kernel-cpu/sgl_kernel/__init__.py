"""FP8 weight-only (W8A16) kernels for CPUs, registered as ``torch.ops.sgl_kernel.*``.

Importing the package loads the library, registers the ops and their fake (shape and dtype) kernels,
and chooses the ISA tier. The environment variable ``SGL_KERNEL_ISA`` lowers the tier; a value that
this machine cannot run makes the import fail with the reason.
"""

from sgl_kernel._library import cpu_info, load_library, set_isa

# The ops must exist before anything below refers to them.
__version__ = load_library()

from sgl_kernel._fakes import register_fakes

register_fakes()

from sgl_kernel.attention import (
    decode_attention_cpu,
    extend_attention_cpu,
    fused_qkv_attention_cpu,
)
from sgl_kernel.graph import Arena, RecordingError, StepGraph, record
from sgl_kernel.ops import (
    bmm_cpu,
    convert_weight_packed,
    fp8_per_channel_scaled_mm_cpu,
    fp8_per_tensor_scaled_mm_cpu,
    fp8_scaled_mm_cpu,
    weight_packed_linear,
)
from sgl_kernel.packing import packed_index, unpack_rows
from sgl_kernel.transformer import (
    add_rmsnorm_cpu,
    concat_columns_cpu,
    fused_add_rmsnorm_cpu,
    fused_qk_norm_rope_store_cpu,
    fused_qk_rmsnorm_cpu,
    packed_embedding_cpu,
    rmsnorm_cpu,
    rotary_embedding_cpu,
    silu_and_mul_cpu,
    store_cache_cpu,
    topk_softmax_cpu,
)

__all__ = [
    "Arena",
    "RecordingError",
    "StepGraph",
    "__version__",
    "add_rmsnorm_cpu",
    "bmm_cpu",
    "concat_columns_cpu",
    "convert_weight_packed",
    "cpu_info",
    "decode_attention_cpu",
    "extend_attention_cpu",
    "fp8_per_channel_scaled_mm_cpu",
    "fp8_per_tensor_scaled_mm_cpu",
    "fp8_scaled_mm_cpu",
    "fused_add_rmsnorm_cpu",
    "fused_qk_norm_rope_store_cpu",
    "fused_qk_rmsnorm_cpu",
    "fused_qkv_attention_cpu",
    "packed_embedding_cpu",
    "packed_index",
    "record",
    "rmsnorm_cpu",
    "rotary_embedding_cpu",
    "set_isa",
    "silu_and_mul_cpu",
    "store_cache_cpu",
    "topk_softmax_cpu",
    "unpack_rows",
    "weight_packed_linear",
]
