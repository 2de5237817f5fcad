"""FP8 weight-only (W8A16) kernels for CPUs, registered as ``torch.ops.sgl_kernel.*``.

Importing the package loads the library, registers the ops and chooses the ISA tier. The environment
variable ``SGL_KERNEL_ISA`` lowers the tier; a value that this machine cannot run makes the import
fail with the reason. Whoever traces the ops (torch.compile, FakeTensor) calls
:func:`sgl_kernel.fakes.register` first.
"""

from sgl_kernel._library import cpu_info, load_library, set_isa

# The ops must exist before anything below refers to them.
__version__ = load_library()

from sgl_kernel import attention, fakes, gemm, heads, transformer
from sgl_kernel.attention import *
from sgl_kernel.gemm import *
from sgl_kernel.graph import Arena, RecordingError, StepGraph, record
from sgl_kernel.heads import *
from sgl_kernel.packing import packed_index, unpack_rows
from sgl_kernel.transformer import *

__all__ = [
    "Arena",
    "RecordingError",
    "StepGraph",
    "__version__",
    "cpu_info",
    "fakes",
    "packed_index",
    "record",
    "set_isa",
    "unpack_rows",
]
__all__ += attention.__all__
__all__ += gemm.__all__
__all__ += heads.__all__
__all__ += transformer.__all__
