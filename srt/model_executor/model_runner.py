"""Runs the model: builds the batch of a forward pass from request states and returns logits."""

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from srt.configs.model_config import ModelConfig
from srt.errors import RequestError
from srt.mem_cache.memory_pool import ContiguousSlotAllocator, TokenToKVPool
from srt.model_executor.cpu_graph_runner import CPUGraphRunner
from srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from srt.model_loader.loader import load_model
from srt.utils.host_memory import read_host_memory

# Share of the memory that is free after loading which the KV cache may take when its size is not
# given.
_KV_MEMORY_SHARE = 0.5


@dataclass(frozen=True)
class ExtendInput:
    """Prompt tokens of one request for an EXTEND pass.

    Attributes:
        token_ids: The tokens to compute, at least one.
        prefix_len: Tokens of the request that the cache holds already.
        cache_start: The request's first cache slot.
    """

    token_ids: Sequence[int]
    prefix_len: int
    cache_start: int


@dataclass(frozen=True)
class DecodeInput:
    """The last token of one request for a DECODE pass; `position` is its place in the request."""

    token_id: int
    position: int
    cache_start: int


class ModelRunner:
    """A loaded model with its KV cache.

    Args:
        config: The model's configuration.
        max_running_requests: Most requests in one decode pass.
        max_total_tokens: Size of the KV cache; None lets it hold `max_running_requests` of full
            length if half of the free memory allows that, and as many tokens as fit there if not.
        graph_batch_sizes: Decode batch sizes to compile; empty for none.
        progress: Show progress bars.

    Raises:
        SrtError: The checkpoint or the configuration does not work.
    """

    def __init__(
        self,
        config: ModelConfig,
        *,
        max_running_requests: int = 32,
        max_total_tokens: int | None = None,
        graph_batch_sizes: Sequence[int] = (),
        progress: bool = True,
    ) -> None:
        self.config = config
        self.model: nn.Module = load_model(config, progress=progress)
        if max_total_tokens is None:
            max_total_tokens = _default_cache_size(config, max_running_requests)
        self.max_running_requests = max_running_requests
        self.kv_pool = TokenToKVPool(max_total_tokens, config.kv_layout, config.dtype)
        self.allocator = ContiguousSlotAllocator(max_total_tokens)
        self.graph_runner: CPUGraphRunner | None = None
        if graph_batch_sizes:
            self.graph_runner = CPUGraphRunner(self.model, self.kv_pool, graph_batch_sizes)
            self.graph_runner.capture(progress=progress)

    @torch.inference_mode()
    def extend(self, inputs: Sequence[ExtendInput]) -> Tensor:
        """Computes prompt tokens into the cache.

        Returns:
            Logits `[B, vocab_size]`, float32, after the last token of each request's part.
        """
        input_ids: list[int] = []
        positions: list[Tensor] = []
        locations: list[Tensor] = []
        for request in inputs:
            input_ids += request.token_ids
            own = torch.arange(request.prefix_len, request.prefix_len + len(request.token_ids))
            positions.append(own)
            locations.append(own + request.cache_start)
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=torch.tensor(input_ids),
            positions=torch.cat(positions),
            out_cache_loc=torch.cat(locations),
            cache_starts=torch.tensor([r.cache_start for r in inputs]),
            seq_lens=torch.tensor([r.prefix_len + len(r.token_ids) for r in inputs]),
            extend_lens=torch.tensor([len(r.token_ids) for r in inputs]),
            kv_pool=self.kv_pool,
        )
        return self.model(batch)

    @torch.inference_mode()
    def decode(self, inputs: Sequence[DecodeInput]) -> Tensor:
        """Computes one token of each request; returns logits `[B, vocab_size]`, float32, of the
        next.
        """
        positions = torch.tensor([r.position for r in inputs])
        cache_starts = torch.tensor([r.cache_start for r in inputs])
        batch = ForwardBatch(
            forward_mode=ForwardMode.DECODE,
            input_ids=torch.tensor([r.token_id for r in inputs]),
            positions=positions,
            out_cache_loc=cache_starts + positions,
            cache_starts=cache_starts,
            seq_lens=positions + 1,
            extend_lens=torch.ones_like(positions),
            kv_pool=self.kv_pool,
        )
        if self.graph_runner is not None and self.graph_runner.can_run(batch):
            return self.graph_runner.replay(batch)
        return self.model(batch)


def _default_cache_size(config: ModelConfig, max_running_requests: int) -> int:
    """Tokens of the KV cache."""
    wanted = config.context_length * max_running_requests
    free = read_host_memory().available
    if free is None:
        return wanted
    token = config.kv_layout.bytes_per_token(config.dtype.itemsize)
    fitting = int(free * _KV_MEMORY_SHARE) // token
    if fitting < 1:
        raise RequestError(
            f"no memory for a KV cache: {free} bytes are free, a token takes {token}"
        )
    return min(wanted, fitting)
