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

from sgl_kernel.ops import (
    bmm_cpu,
    convert_weight_packed,
    fp8_per_channel_scaled_mm_cpu,
    fp8_per_tensor_scaled_mm_cpu,
    fp8_scaled_mm_cpu,
    weight_packed_linear,
)
from sgl_kernel.packing import packed_index, unpack_rows

__all__ = [
    "__version__",
    "bmm_cpu",
    "convert_weight_packed",
    "cpu_info",
    "fp8_per_channel_scaled_mm_cpu",
    "fp8_per_tensor_scaled_mm_cpu",
    "fp8_scaled_mm_cpu",
    "packed_index",
    "set_isa",
    "unpack_rows",
    "weight_packed_linear",
]
