"""Compiled decode: the model through `torch.compile`, once for each captured batch size.

Every shape in a captured batch is fixed, so nothing is compiled after `capture`: a smaller batch is
padded up with rows that have no tokens, and attention, whose work depends on the lengths of the
requests, is an opaque operator. Tracing needs the fake kernel (result's shape and dtype) of every
operator, which `capture` checks first.
"""

import sys
import warnings
from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import fields, replace
from typing import Any

import torch
from packaging.version import Version
from torch import Tensor, nn
from tqdm import tqdm

from srt.errors import SrtError
from srt.mem_cache.memory_pool import PADDING_SLOT, TokenToKVPool
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

# Older inductors fail on fused code that rounds as separate operators would.
MIN_TORCH = "2.13"


def default_batch_sizes(max_running_requests: int) -> tuple[int, ...]:
    """Powers of two below the limit, and the limit."""
    sizes = [1 << i for i in range(max_running_requests.bit_length())]
    return tuple(sorted({*(s for s in sizes if s < max_running_requests), max_running_requests}))


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
        kv_pool: The cache that its batches refer to.
        batch_sizes: Batch sizes to compile.
    """

    def __init__(
        self, model: nn.Module, kv_pool: TokenToKVPool, batch_sizes: Sequence[int]
    ) -> None:
        self.batch_sizes = sorted(set(batch_sizes))
        self._kv_pool = kv_pool
        # Fused code rounds to 16 bits where separate operators would, so that it gives the same
        # logits.
        self._compiled = torch.compile(
            model, dynamic=False, fullgraph=True, options={"emulate_precision_casts": True}
        )

    @torch.inference_mode()
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
                self._run(_padding(size, self._kv_pool))

    def can_run(self, batch: ForwardBatch) -> bool:
        """Whether the batch fits into a captured size."""
        return batch.input_ids.numel() <= self.batch_sizes[-1]

    @torch.inference_mode()
    def replay(self, batch: ForwardBatch) -> Tensor:
        """Logits `[B, vocab_size]` of a decode batch, computed at the next captured size."""
        count = batch.input_ids.numel()
        size = self.batch_sizes[bisect_left(self.batch_sizes, count)]
        if size != count:
            batch = _pad(batch, size)
        return self._run(batch)[:count]

    def _run(self, batch: ForwardBatch) -> Tensor:
        try:
            logits: Tensor = self._compiled(batch)
        except torch._dynamo.exc.BackendCompilerFailed as error:
            if isinstance(error.inner_exception, torch._inductor.exc.InvalidCxxCompiler):
                raise SrtError(
                    "graph mode needs a C++ compiler (such as g++); found none"
                ) from error
            raise
        return logits


def _padding(size: int, kv_pool: TokenToKVPool) -> ForwardBatch:
    """A decode batch of `size` rows without tokens."""

    def full(value: int) -> Tensor:
        # A tensor for each field: code that is compiled for inputs that are one tensor would be
        # compiled again for those of a request, which are not.
        return torch.full((size,), value, dtype=torch.int64)

    return ForwardBatch(
        forward_mode=ForwardMode.DECODE,
        input_ids=full(0),
        positions=full(0),
        out_cache_loc=full(PADDING_SLOT),
        cache_starts=full(PADDING_SLOT),
        seq_lens=full(0),
        extend_lens=full(1),
        kv_pool=kv_pool,
    )


def _pad(batch: ForwardBatch, size: int) -> ForwardBatch:
    """`batch` followed by rows without tokens, up to `size` rows."""
    padding = _padding(size - batch.input_ids.numel(), batch.kv_pool)
    padded: dict[str, Any] = {
        field.name: torch.cat([getattr(batch, field.name), getattr(padding, field.name)])
        for field in fields(ForwardBatch)
        if isinstance(getattr(batch, field.name), Tensor)
    }
    return replace(batch, **padded)
