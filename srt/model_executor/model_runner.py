"""Runs the model: builds the batch of a forward pass from request states and returns logits."""

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from srt.configs.dtypes import KV_CACHE_DTYPES
from srt.configs.engine_config import EngineConfig
from srt.configs.model_config import ModelConfig
from srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from srt.mem_cache.allocator import TokenToKVPoolAllocator
from srt.mem_cache.cache_size import choose_cache_size
from srt.mem_cache.memory_pool import TokenToKVPool
from srt.mem_cache.req_to_token_pool import ReqToTokenPool
from srt.model_executor.cpu_graph_runner import CPUGraphRunner, default_batch_sizes
from srt.model_executor.decode_buffers import DecodeBuffers
from srt.model_executor.fast_attributes import flatten_attributes
from srt.model_executor.step_graph_runner import StepGraphRunner
from srt.model_loader.kv_scales import read_kv_scales
from srt.model_loader.loader import load_model
from srt.utils.host_memory import read_host_memory
from srt.utils.inference_mode import in_inference_mode
from srt.utils.process_memory import mapped_rss


@dataclass(frozen=True)
class ExtendInput:
    """Prompt tokens of one request for an EXTEND pass.

    Attributes:
        token_ids: The tokens to compute, at least one.
        prefix_len: Tokens of the request that the cache holds already.
        req_pool_idx: The request's row of the request table, where the slots of all its tokens up
            to the last of these are written.
        all_logits: Return logits after each of the tokens, not only after the last.
    """

    token_ids: Sequence[int] | npt.NDArray[np.int32]
    prefix_len: int
    req_pool_idx: int
    all_logits: bool = False


class ModelRunner:
    """A loaded model with its KV cache.

    Args:
        config: The model's configuration.
        options: How it is held and run; only those are read that concern it.

    Raises:
        SrtError: The checkpoint or the configuration does not work.
    """

    def __init__(self, config: ModelConfig, options: EngineConfig) -> None:
        packed_cache = None if options.packed_cache is None else Path(options.packed_cache)
        self.config = config
        self.model = load_model(config, progress=options.progress, packed_cache=packed_cache)
        if options.quantize_lm_head:
            self.model.quantize_lm_head()
        kv_dtype, kv_scales = config.dtype, None
        if KV_CACHE_DTYPES[options.kv_cache_dtype] == "fp8_e4m3":
            kv_dtype = torch.float8_e4m3fn
            kv_scales = read_kv_scales(config.path, config.num_hidden_layers)
        available = read_host_memory().available
        if available is not None:
            available = max(0, available - mapped_rss())
        size = choose_cache_size(
            config.kv_layout.bytes_per_token(kv_dtype.itemsize),
            wanted=config.context_length * options.max_running_requests,
            max_total_tokens=options.max_total_tokens,
            mem_fraction=options.mem_fraction,
            available=available,
        )
        self.max_running_requests = options.max_running_requests
        self.kv_pool = TokenToKVPool(size, config.kv_layout, kv_dtype, kv_scales)
        self.allocator = TokenToKVPoolAllocator(size)
        self.req_to_token_pool = ReqToTokenPool(options.max_running_requests, config.context_length)
        sizes = _compiled_batch_sizes(options)
        self._buffers = DecodeBuffers(
            max((options.max_running_requests, *sizes)), self.req_to_token_pool, self.kv_pool
        )
        self.graph_runner: CPUGraphRunner | None = None
        if sizes:
            self.model.prepare_positions(1)
            self.graph_runner = CPUGraphRunner(self.model, self._buffers, sizes)
            self.graph_runner.capture(progress=options.progress)
        else:
            flatten_attributes(self.model)
        self.step_graph_runner: StepGraphRunner | None = None
        if not options.disable_graph:
            # Logits and a few activations of a layer; what is not used costs nothing.
            row = 4 * config.vocab_size + 64 * config.hidden_size
            self.step_graph_runner = StepGraphRunner(self.model, self.max_running_requests * row)

    @in_inference_mode
    def extend(self, inputs: Sequence[ExtendInput]) -> Tensor:
        """Computes prompt tokens into the cache.

        Returns:
            Logits `[L, vocab_size]`, float32, after the last token of each request's part, or after
            each of its tokens where `all_logits` asks for them.
        """
        table = self.req_to_token_pool.table
        lengths = [len(part.token_ids) for part in inputs]
        ends = [part.prefix_len + n for part, n in zip(inputs, lengths, strict=True)]
        self.model.prepare_positions(max(ends))
        starts = np.cumsum([0, *lengths[:-1]])
        positions = np.concatenate(
            [np.arange(p.prefix_len, end) for p, end in zip(inputs, ends, strict=True)]
        )
        locations = np.concatenate(
            [table[p.req_pool_idx, p.prefix_len : end] for p, end in zip(inputs, ends, strict=True)]
        )
        wanted = np.concatenate(
            [
                np.arange(start if part.all_logits else start + n - 1, start + n)
                for part, start, n in zip(inputs, starts, lengths, strict=True)
            ]
        )
        batch = ForwardBatch(
            forward_mode=ForwardMode.EXTEND,
            input_ids=_int64(np.concatenate([part.token_ids for part in inputs])),
            positions=_int64(positions),
            out_cache_loc=_int64(locations),
            req_to_token=self.req_to_token_pool.req_to_token,
            req_pool_indices=torch.tensor([part.req_pool_idx for part in inputs]),
            seq_lens=torch.tensor(ends),
            extend_seq_lens=torch.tensor(lengths),
            extend_start_loc=_int64(starts),
            max_extend_len=max(lengths),
            logits_indices=_int64(wanted),
            kv_pool=self.kv_pool,
        )
        logits: Tensor = self.model(batch)
        return logits

    @in_inference_mode
    def decode(
        self, token_ids: Sequence[int], req_pool_indices: Sequence[int], seq_lens: Sequence[int]
    ) -> Tensor:
        """Computes one token of each request.

        Args:
            token_ids: The tokens.
            req_pool_indices: Each request's row of the request table, where the slots of its tokens
                are written, this one's included.
            seq_lens: Tokens of each request, this one included.

        Returns:
            Logits `[B, vocab_size]`, float32, of the next token; valid until the next pass.
        """
        count = len(token_ids)
        self.model.prepare_positions(max(seq_lens, default=1))
        if self.graph_runner is not None:
            size = self.graph_runner.padded_size(count)
            if size is not None:
                batch = self._buffers.fill(token_ids, req_pool_indices, seq_lens, size)
                return self.graph_runner.replay(batch)[:count]
        batch = self._buffers.fill(token_ids, req_pool_indices, seq_lens, count)
        if self.step_graph_runner is not None:
            return self.step_graph_runner.run(batch)
        logits: Tensor = self.model(batch)
        return logits


def _compiled_batch_sizes(options: EngineConfig) -> Sequence[int]:
    if not options.enable_torch_compile:
        return ()
    return options.compiled_batch_sizes or default_batch_sizes(options.max_running_requests)


def _int64(array: npt.NDArray[np.integer]) -> Tensor:
    return torch.from_numpy(array.astype(np.int64, copy=False))
