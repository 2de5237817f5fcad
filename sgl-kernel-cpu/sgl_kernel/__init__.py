"""FP8 weight-only (W8A16) kernels for CPUs, registered as ``torch.ops.sgl_kernel.*``.

Importing the package loads the library, registers the ops and chooses the ISA tier. The environment
variable ``SGL_KERNEL_ISA`` lowers the tier; a value that this machine cannot run makes the import
fail with the reason. Whoever traces the ops (torch.compile, FakeTensor) calls
:func:`sgl_kernel.fakes.register` first.
"""

from sgl_kernel._library import cpu_info as cpu_info
from sgl_kernel._library import load_library
from sgl_kernel._library import set_isa as set_isa

# The ops must exist before anything below refers to them.
__version__ = load_library()

from sgl_kernel import fakes as fakes
from sgl_kernel.attention import *
from sgl_kernel.gemm import *
from sgl_kernel.graph import Arena as Arena
from sgl_kernel.graph import RecordingError as RecordingError
from sgl_kernel.graph import StepGraph as StepGraph
from sgl_kernel.graph import record as record
from sgl_kernel.heads import *
from sgl_kernel.packing import packed_index as packed_index
from sgl_kernel.packing import unpack_rows as unpack_rows
from sgl_kernel.transformer import *
