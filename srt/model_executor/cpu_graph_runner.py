"""Compiled decode: the model through `torch.compile`, once for each captured batch size.

Every shape in a captured batch is fixed, so nothing is compiled after `capture`: a smaller batch is
padded up with rows of padding, and attention, whose work depends on the lengths of the
requests, is an opaque operator. Tracing needs the fake kernel (result's shape and dtype) of every
operator: `capture` registers those of the kernel package and looks for operators that have none.
"""

import sys
import warnings
from bisect import bisect_left
from collections.abc import Sequence

import torch
from packaging.version import Version
from torch import Tensor, nn
from tqdm import tqdm

import sgl_kernel
from srt.errors import SrtError
from srt.layers.forward_batch_info import ForwardBatch
from srt.model_executor.decode_buffers import DecodeBuffers
from srt.utils.inference_mode import in_inference_mode

# Older inductors fail on fused code that rounds as separate operators would.
MIN_TORCH = "2.13"


def default_batch_sizes(max_running_requests: int) -> tuple[int, ...]:
    """Powers of two below the limit, and the limit."""
    sizes = [1 << i for i in range(max_running_requests.bit_length())]
    return tuple(sorted({*(s for s in sizes if s < max_running_requests), max_running_requests}))


def register_fake_ops() -> None:
    """Registers the fake kernels of the ops of `sgl_kernel`, which importing it does not. Further
    calls do nothing.
    """
    sgl_kernel.fakes.register()


def operators_without_fake(namespace: str) -> list[str]:
    """Names of the operators in `torch.ops.<namespace>` that cannot be traced because they have no
    fake kernel.
    """
    missing = []
    for name in torch._C._dispatch_get_all_op_names():
        if not name.startswith(f"{namespace}::"):
            continue
        entry = torch._library.simple_registry.singleton.find(name.partition(".")[0])
        has_fake = entry.fake_impl.kernel is not None or any(
            torch._C._dispatch_has_kernel_for_dispatch_key(name, key)
            for key in ("Meta", "CompositeImplicitAutograd")
        )
        if not has_fake:
            missing.append(name)
    return sorted(missing)


class CPUGraphRunner:
    """Runs decode batches through compiled code.

    Args:
        model: A loaded model.
        buffers: Where its batches are.
        batch_sizes: Batch sizes to compile.
    """

    def __init__(
        self, model: nn.Module, buffers: DecodeBuffers, batch_sizes: Sequence[int]
    ) -> None:
        self.batch_sizes = sorted(set(batch_sizes))
        self._buffers = buffers
        # Fused code rounds to 16 bits where separate operators would, so that it gives the same
        # logits.
        self._compiled = torch.compile(
            model, dynamic=False, fullgraph=True, options={"emulate_precision_casts": True}
        )

    @in_inference_mode
    def capture(self, *, progress: bool = True) -> None:
        """Compiles every batch size, on batches of padding.

        Raises:
            SrtError: Torch is too old, an operator has no fake kernel, or there is no C++ compiler.
        """
        if Version(Version(torch.__version__).base_version) < Version(MIN_TORCH):
            raise SrtError(
                f"graph mode needs Torch {MIN_TORCH} or later, found {torch.__version__}; "
                "run without it, or install a newer Torch"
            )
        register_fake_ops()
        missing = operators_without_fake("sgl_kernel")
        if missing:
            raise SrtError(f"graph mode needs a fake kernel of {', '.join(missing)}")
        bar = tqdm(
            self.batch_sizes,
            desc="Compiling decode",
            unit="batch size",
            file=sys.stderr,
            leave=False,
            disable=not (progress and sys.stderr.isatty()),
        )
        # One entry of the compiler's cache is one batch size; the usual limit is lower than what
        # may be asked for.
        limit = max(len(self.batch_sizes), torch._dynamo.config.recompile_limit)
        with torch._dynamo.config.patch(recompile_limit=limit), warnings.catch_warnings():
            # The bfloat16 token table feeds float16 layers, which inductor handles but remarks on.
            warnings.filterwarnings("ignore", message="bf16 and fp16 are mixed")
            for size in bar:
                self.replay(self._buffers.fill([], [], [], size))

    def padded_size(self, count: int) -> int | None:
        """The captured size that `count` requests run at; None if they are too many."""
        if count > self.batch_sizes[-1]:
            return None
        return self.batch_sizes[bisect_left(self.batch_sizes, count)]

    @in_inference_mode
    def replay(self, batch: ForwardBatch) -> Tensor:
        """Logits `[B, vocab_size]` of a batch of a captured size."""
        try:
            logits: Tensor = self._compiled(batch)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, torch._inductor.exc.InvalidCxxCompiler):
                raise SrtError(
                    "graph mode needs a C++ compiler (such as g++); found none"
                ) from error
            raise
        return logits
