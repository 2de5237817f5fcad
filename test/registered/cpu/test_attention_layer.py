"""Attention layers over a paged cache with scattered slots, against plain attention in float64."""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig

import sgl_kernel  # noqa: F401  (registers the ops)
from srt.checkpoint.kv_layout import KVLayout
from srt.layers.attention import RadixAttention, RadixLatentAttention
from srt.layers.forward_batch_info import ForwardBatch, ForwardMode
from srt.layers.layernorm import RMSNorm
from srt.layers.rotary_embedding import RotaryEmbedding, get_rope
from srt.mem_cache.memory_pool import TokenToKVPool
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="per-commit")

HEADS, KV_HEADS, DIM = 6, 2, 32
SLOTS, CONTEXT = 300, 128

# Each request: tokens in the cache before, tokens of this pass.
BATCHES = {
    "prefill": [(0, 11)],
    "chunk": [(40, 7)],
    "decode": [(12, 1), (1, 1), (90, 1)],
    "mixed": [(0, 5), (33, 1), (70, 9)],
}


def randn(*shape: int, seed: int) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def make_rope(**parameters: Any) -> RotaryEmbedding:
    config = LlamaConfig(
        head_dim=DIM,
        max_position_embeddings=CONTEXT,
        rope_parameters={"rope_type": "default", "rope_theta": 1e4, **parameters},
    )
    rope = get_rope(config, DIM)
    rope.prepare(CONTEXT)
    return rope


class Requests:
    """Requests whose slots are scattered over the cache."""

    def __init__(self, lengths: list[tuple[int, int]], pool: TokenToKVPool) -> None:
        self.lengths = lengths
        self.pool = pool
        slots = torch.randperm(SLOTS, generator=torch.Generator().manual_seed(3)) + 1
        self.table = torch.zeros(len(lengths) + 1, CONTEXT, dtype=torch.int32)
        for row, (prefix, new) in enumerate(lengths, start=1):
            used = sum(p + n for p, n in lengths[: row - 1])
            self.table[row, : prefix + new] = slots[used : used + prefix + new]

    def passes(self) -> list[ForwardBatch]:
        """A pass that computes all prefixes, if there are any, and the pass in question."""
        prefixes = [(0, prefix) for prefix, _ in self.lengths]
        return [self._batch(part) for part in (prefixes, self.lengths) if any(n for _, n in part)]

    def _batch(self, lengths: list[tuple[int, int]]) -> ForwardBatch:
        rows = [row for row, (_, new) in enumerate(lengths, start=1) if new]
        parts = [lengths[row - 1] for row in rows]
        new = torch.tensor([n for _, n in parts])
        decodes = lengths is self.lengths and bool((new == 1).all())
        positions = torch.cat([torch.arange(p, p + n) for p, n in parts])
        owners = torch.tensor(rows).repeat_interleave(new)
        return ForwardBatch(
            forward_mode=ForwardMode.DECODE if decodes else ForwardMode.EXTEND,
            input_ids=torch.zeros_like(positions),
            positions=positions,
            out_cache_loc=self.table[owners, positions].to(torch.int64),
            req_to_token=self.table,
            req_pool_indices=torch.tensor(rows),
            seq_lens=torch.tensor([p + n for p, n in parts]),
            extend_seq_lens=new,
            extend_start_loc=new.cumsum(0) - new,
            max_extend_len=int(new.max()),
            logits_indices=new.cumsum(0) - 1,
            kv_pool=self.pool,
        )


def reference(
    q: Tensor, k: Tensor, v: Tensor, prefix: int, scale: float, window: int | None
) -> Tensor:
    """Causal attention in float64 of the tokens after `prefix` over all of a sequence."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q[prefix:].double(), k) * scale
    distance = torch.arange(prefix, k.shape[0])[:, None] - torch.arange(k.shape[0])
    hidden = (distance < 0) | (distance >= (window or k.shape[0]))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def rotate(x: Tensor, rope: RotaryEmbedding | None) -> Tensor:
    """`[T, heads, DIM]` float64 of a whole sequence, rotated."""
    if rope is None:
        return x
    cos, sin = rope.cos_sin_cache[: x.shape[0], None].double().chunk(2, dim=-1)
    first, second = x.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


OPTIONS: dict[str, dict[str, Any]] = {
    "plain": {},
    "window": {"window": 8},
    "no rotation": {"rotated": False},
    "head norms": {"norms": True},
    "scaled queries": {"scaling": True, "window": 33},
    "fp8 cache": {"cache": torch.float8_e4m3fn, "scales": (0.25, 2.0)},
    "bfloat16": {"dtype": torch.bfloat16},
    "float32": {"dtype": torch.float32},
}


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("options", OPTIONS.values(), ids=OPTIONS)
def test_grouped_query_attention(lengths: list[tuple[int, int]], options: dict[str, Any]) -> None:
    dtype, window = options.get("dtype", torch.float16), options.get("window")
    cache_dtype, scales = options.get("cache", dtype), options.get("scales", (1.0, 1.0))
    rope: RotaryEmbedding | None = None
    if options.get("rotated", True):
        extra = {"llama_4_scaling_beta": 0.5, "original_max_position_embeddings": 16}
        rope = make_rope(**(extra if "scaling" in options else {}))
    norms: tuple[RMSNorm, ...] = ()
    if "norms" in options:
        norms = RMSNorm(DIM, 1e-5, torch.float32), RMSNorm(DIM, 1e-5, torch.float32)
        for i, norm in enumerate(norms):
            norm.weight.data.copy_(randn(DIM, seed=i))
    layer = RadixAttention(HEADS, DIM, KV_HEADS, 1, sliding_window=window)
    pool = TokenToKVPool(SLOTS, KVLayout(2, KV_HEADS, DIM, DIM), cache_dtype, [(1.0, 1.0), scales])
    for buffer in pool.get_kv_buffer(1):
        assert buffer is not None
        buffer.fill_(torch.nan)
    requests = Requests(lengths, pool)
    sequences = [
        randn(p + n, (HEADS + 2 * KV_HEADS) * DIM, seed=i).to(dtype)
        for i, (p, n) in enumerate(lengths)
    ]
    for batch in requests.passes():
        new, ends = batch.extend_seq_lens.tolist(), batch.seq_lens.tolist()
        rows = zip(batch.req_pool_indices.tolist(), new, ends, strict=True)
        qkv = torch.cat([sequences[r - 1][end - n : end] for r, n, end in rows])
        out = layer(qkv, batch, rope, *norms)
    assert out.dtype == dtype
    expected = []
    for (prefix, _), sequence in zip(lengths, sequences, strict=True):
        heads = sequence.double().unflatten(1, (-1, DIM))
        q, k, v = heads.split((HEADS, KV_HEADS, KV_HEADS), dim=1)
        if norms:
            q, k = (
                x / (x.square().mean(-1, keepdim=True) + 1e-5).sqrt() * norm.weight.double()
                for x, norm in zip((q, k), norms, strict=True)
            )
        q, k = rotate(q, rope), rotate(k, rope)
        if "scaling" in options:
            q = q * (1 + 0.5 * torch.log1p(torch.arange(q.shape[0]) // 16))[:, None, None]
        expected.append(reference(q, k, v, prefix, DIM**-0.5, window))
    # What is held in 8 bits has a significand of 4.
    tolerance = {torch.float32: 1e-5, torch.float16: 4e-3, torch.bfloat16: 3e-2}[dtype]
    tolerance = 0.25 if cache_dtype.itemsize == 1 else tolerance
    torch.testing.assert_close(out.double(), torch.cat(expected).flatten(1), rtol=0, atol=tolerance)


@pytest.mark.parametrize("lengths", BATCHES.values(), ids=BATCHES)
@pytest.mark.parametrize("cache_dtype", [torch.float16, torch.float8_e4m3fn])
def test_latent_attention(lengths: list[tuple[int, int]], cache_dtype: torch.dtype) -> None:
    latent, rope_dim, scale = 48, 16, 0.11
    layer = RadixLatentAttention(latent, 0, scale=scale)
    pool = TokenToKVPool(SLOTS, KVLayout(1, 1, latent + rope_dim, 0), cache_dtype)
    pool.get_kv_buffer(0)[0].fill_(torch.nan)
    requests = Requests(lengths, pool)
    queries = [randn(p + n, HEADS, 64, seed=i).half() for i, (p, n) in enumerate(lengths)]
    keys = [randn(p + n, 1, 64, seed=50 + i).half() for i, (p, n) in enumerate(lengths)]
    for batch in requests.passes():
        new, ends = batch.extend_seq_lens.tolist(), batch.seq_lens.tolist()
        parts = [
            (r - 1, slice(end - n, end))
            for r, n, end in zip(batch.req_pool_indices.tolist(), new, ends, strict=True)
        ]
        query, key = (torch.cat([ts[r][part] for r, part in parts]) for ts in (queries, keys))
        out = layer(query, key, batch)
    expected = [
        reference(q, k, k[..., :latent], prefix, scale, None)
        for (prefix, _), q, k in zip(lengths, queries, keys, strict=True)
    ]
    tolerance = 4e-3 if cache_dtype.itemsize > 1 else 0.25
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=0, atol=tolerance)


@pytest.mark.parametrize("extend", [False, True])
def test_the_latent_operator_has_a_fake_that_agrees(extend: bool) -> None:
    query, key, cache = randn(2, 3, 32, seed=1), randn(2, 1, 32, seed=2), torch.zeros(9, 1, 32)
    slots, rows, ones = torch.tensor([1, 5]), torch.arange(2), torch.ones(2, dtype=torch.int64)
    table = slots.to(torch.int32)[:, None]
    extra = (ones, torch.arange(2)) if extend else (None, None)
    args = (query, key, cache, 24, math.sqrt(0.1), 1.0, slots, table, rows, ones, *extra, 1)
    torch.library.opcheck(torch.ops.srt.latent_attention.default, args)
