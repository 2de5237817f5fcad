"""Norm, activation, rotary embedding, token table and attention against plain definitions in higher
precision.
"""

import math
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from srt.configs.kv_layout import KVLayout, get_kv_layout
from srt.errors import UnsupportedConfigError
from srt.layers.activation import SiluAndMul
from srt.layers.attention import attention
from srt.layers.layernorm import RMSNorm
from srt.layers.rotary_embedding import get_rope
from srt.layers.vocab_embedding import LMHead, TiedLMHead, VocabEmbedding
from srt.mem_cache.memory_pool import TokenToKVPool
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=6, suite="per-commit")

LLAMA3 = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 16.0,
    "original_max_position_embeddings": 8192,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}
ROPES: dict[str, dict[str, Any]] = {
    "default": {"rope_theta": 1e4},
    "linear": {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0},
    "dynamic": {"rope_type": "dynamic", "rope_theta": 1e4, "factor": 4.0},
    "llama3": LLAMA3,
    "yarn": YARN,
    "yarn with mscale": YARN | {"mscale": 1.0, "mscale_all_dim": 1.0},
}


def randn(*shape: int, dtype: torch.dtype = torch.bfloat16, seed: int = 0) -> Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("magnitude", [1e-3, 1.0, 100.0])
def test_rms_norm_is_rounded_once(dtype: torch.dtype, magnitude: float) -> None:
    norm = RMSNorm(96, 1e-5, dtype)
    norm.weight = torch.nn.Parameter(randn(96, dtype=torch.float32, seed=1), requires_grad=False)
    x = randn(7, 96, dtype=torch.float32) * magnitude
    expected = x.double() / (x.double().square().mean(-1, keepdim=True) + 1e-5).sqrt()
    expected = expected * norm.weight.double()
    out = norm(x)
    assert out.dtype == dtype
    torch.testing.assert_close(
        out.double(), expected, rtol=torch.finfo(dtype).eps, atol=torch.finfo(torch.float32).eps
    )


def test_silu_and_mul() -> None:
    x = randn(5, 2 * 33)
    gate, up = x.double().chunk(2, dim=-1)
    expected = gate / (1 + (-gate).exp()) * up
    torch.testing.assert_close(SiluAndMul()(x).double(), expected, rtol=2**-7, atol=1e-6)


def rope_config(parameters: dict[str, Any], max_position_embeddings: int = 131072) -> LlamaConfig:
    return LlamaConfig(
        head_dim=64,
        max_position_embeddings=max_position_embeddings,
        rope_parameters={"rope_type": "default", **parameters},
    )


@pytest.mark.parametrize("parameters", ROPES.values(), ids=ROPES)
def test_rotary_embedding_is_that_of_transformers(parameters: dict[str, Any]) -> None:
    config = rope_config(parameters)
    positions = torch.tensor([0, 1, 77, 8191, 100_000])
    cos, sin = LlamaRotaryEmbedding(config)(torch.empty(1, 1), positions[None])
    x = randn(5, 3, 64, dtype=torch.float32)
    half = torch.cat([-x[..., 32:], x[..., :32]], dim=-1)
    expected = x * cos[0][:, None] + half * sin[0][:, None]
    rope = get_rope(config, 64)
    out = rope.rotate(x, rope(positions))
    # float32 angles near 1e5 differ by their last bit when the frequencies do.
    torch.testing.assert_close(out, expected, rtol=0, atol=0.05)
    torch.testing.assert_close(out[:3], expected[:3], rtol=0, atol=1e-4)


def test_interleaved_rotation_is_a_complex_product() -> None:
    rope = get_rope(rope_config(YARN), 64, interleaved=True)
    positions = torch.tensor([0, 1, 77, 8191])
    x = randn(4, 3, 64, dtype=torch.float32)
    angles = positions.double()[:, None, None] * rope.inv_freq[::2].double()
    turned = torch.view_as_complex(x.double().unflatten(-1, (32, 2))) * torch.polar(
        torch.full_like(angles, rope.attention_factor), angles
    )
    out = rope.rotate(x, rope(positions))
    torch.testing.assert_close(
        out.double(), torch.view_as_real(turned).flatten(-2), rtol=0, atol=2e-3
    )


def test_partial_rotation_leaves_the_rest_alone() -> None:
    config = rope_config({"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    rope, whole = get_rope(config, 64), get_rope(rope_config({"rope_theta": 1e4}), 32)
    positions, x = torch.tensor([3, 40]), randn(2, 3, 64, dtype=torch.float32)
    out = rope.rotate(x, rope(positions))
    assert torch.equal(out[..., 32:], x[..., 32:])
    assert torch.equal(out[..., :32], whole.rotate(x[..., :32], whole(positions)))


def test_queries_are_scaled_from_the_original_length_on() -> None:
    rope = get_rope(rope_config(YARN | {"llama_4_scaling_beta": 0.1}), 64)
    scale = rope(torch.tensor([0, 8191, 8192, 16383, 16384])).query_scale
    assert scale is not None
    expected = [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)]
    torch.testing.assert_close(scale.flatten(), torch.tensor(expected))


@pytest.mark.parametrize(
    ("parameters", "named"),
    [
        ({"rope_type": "longrope", "rope_theta": 1e4}, "longrope"),
        ({"rope_type": "llama3", "rope_theta": 1e4}, "factor"),
        ({"rope_type": "yarn", "rope_theta": 1e4}, "factor"),
        ({"rope_type": "default"}, "rope_theta"),
        ({"rope_theta": 1e4, "partial_rotary_factor": 0.3}, "partial_rotary_factor"),
    ],
)
def test_other_rotary_embeddings_are_refused(parameters: dict[str, Any], named: str) -> None:
    config = LlamaConfig(head_dim=64)
    config.rope_parameters = parameters
    with pytest.raises(UnsupportedConfigError, match=named):
        get_rope(config, 64)


@pytest.mark.parametrize(("vocab_size", "hidden_size"), [(1007, 96), (64, 64), (33, 31)])
def test_tied_table_is_held_once_and_read_both_ways(vocab_size: int, hidden_size: int) -> None:
    table = randn(vocab_size, hidden_size)
    embedding = VocabEmbedding(vocab_size, hidden_size, torch.bfloat16, packed=True)
    embedding.weight = torch.nn.Parameter(table.clone(), requires_grad=False)
    embedding.process_weights_after_loading()
    head = TiedLMHead(embedding)
    assert list(head.parameters()) == []
    ids = torch.tensor([0, vocab_size - 1, 5, 5, 31])
    assert torch.equal(embedding(ids), table[ids])
    x = randn(3, hidden_size)
    logits = head(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ table.float().T, rtol=1e-5, atol=1e-4)


def test_untied_head_gives_float32_logits() -> None:
    head = LMHead(96, 1007, quant_config=None)
    table = randn(1007, 96)
    head.weight = torch.nn.Parameter(table.clone(), requires_grad=False)
    head.process_weights_after_loading()
    logits = head(randn(2, 96))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, randn(2, 96).float() @ table.float().T, rtol=1e-5, atol=1e-4)


# Each request: tokens in the cache before, tokens of this pass.
ATTENTION_BATCHES = {
    "prefill": [(0, 11)],
    "one token": [(0, 1)],
    "chunk": [(40, 7)],
    "decode": [(12, 1), (1, 1), (57, 1)],
    "mixed": [(0, 5), (33, 1), (17, 9)],
}


def make_cache(slots: int, num_kv_heads: int, head_dim: int) -> Tensor:
    """Keys or values `[slots, num_kv_heads, head_dim]`, NaN: reading what nobody wrote shows."""
    return torch.full((slots, num_kv_heads, head_dim), torch.nan).bfloat16()


@pytest.mark.parametrize("batch", ATTENTION_BATCHES.values(), ids=ATTENTION_BATCHES)
@pytest.mark.parametrize("window", [None, 1, 8, 33])
@pytest.mark.parametrize(
    ("num_heads", "num_kv_heads", "head_dim", "v_head_dim"),
    [(3, 1, 32, 32), (4, 2, 32, 32), (2, 2, 32, 24), (3, 1, 40, 32)],
    ids=["one group", "two groups", "smaller values", "values in keys"],
)
def test_attention(
    batch: list[tuple[int, int]],
    window: int | None,
    num_heads: int,
    num_kv_heads: int,
    head_dim: int,
    v_head_dim: int,
) -> None:
    slots, latent = 300, head_dim == 40
    total = sum(new for _, new in batch)
    q = randn(total, num_heads, head_dim, seed=1)
    k = randn(total, num_kv_heads, head_dim, seed=2)
    v = k[..., :v_head_dim] if latent else randn(total, num_kv_heads, v_head_dim, seed=3)
    k_cache = make_cache(slots, num_kv_heads, head_dim)
    v_cache = k_cache[..., :v_head_dim] if latent else make_cache(slots, num_kv_heads, v_head_dim)
    table = torch.zeros(len(batch), 64, dtype=torch.int32)
    locations: list[int] = []
    expected: list[Tensor] = []
    start, first = 1, 0
    for row, (prefix, new) in enumerate(batch):
        old = slice(start, start + prefix)
        k_cache[old] = randn(prefix, num_kv_heads, head_dim, seed=10 + start)
        if not latent:
            v_cache[old] = randn(prefix, num_kv_heads, v_head_dim, seed=11 + start)
        part = slice(first, first + new)
        keys, values = torch.cat([k_cache[old], k[part]]), torch.cat([v_cache[old], v[part]])
        expected.append(reference_attention(q[part], keys, values, window))
        table[row, : prefix + new] = torch.arange(start, start + prefix + new)
        locations += range(start + prefix, start + prefix + new)
        start += prefix + new + 3
        first += new
    out = attention(
        q,
        k,
        None if latent else v,
        k_cache,
        None if latent else v_cache,
        torch.tensor(locations),
        table,
        torch.arange(len(batch)),
        torch.tensor([sum(lengths) for lengths in batch]),
        torch.tensor([new for _, new in batch]),
        head_dim**-0.5,
        v_head_dim,
        window,
    )
    torch.testing.assert_close(out.double(), torch.cat(expected), rtol=0, atol=0.02)
    assert torch.equal(k_cache[locations], k)
    assert torch.equal(v_cache[locations], v)


def reference_attention(q: Tensor, k: Tensor, v: Tensor, window: int | None) -> Tensor:
    """Causal attention in float64 of the last tokens of a sequence over all of it."""
    group = q.shape[1] // k.shape[1]
    k, v = (t.double().repeat_interleave(group, dim=1) for t in (k, v))
    scores = torch.einsum("qhd,khd->hqk", q.double(), k) / math.sqrt(q.shape[-1])
    distance = torch.arange(k.shape[0] - q.shape[0], k.shape[0])[:, None] - torch.arange(k.shape[0])
    hidden = (distance < 0) | (distance >= (window or k.shape[0]))
    return torch.einsum("hqk,khd->qhd", scores.masked_fill(hidden, -torch.inf).softmax(-1), v)


def test_long_latent_prompts_go_block_by_block(monkeypatch: pytest.MonkeyPatch) -> None:
    q, k = randn(37, 4, 40), randn(37, 1, 40)
    positions, row, length = torch.arange(37), torch.tensor([0]), torch.tensor([37])
    table = positions.to(torch.int32)[None]

    def run() -> Tensor:
        cache = make_cache(37, 1, 40)
        batch = (positions, table, row, length, length)
        return attention(q, k, None, cache, None, *batch, 0.2, 32, None)

    whole = run()
    monkeypatch.setattr("srt.layers.attention._MAX_SCORES", 4 * 37 * 5)
    torch.testing.assert_close(run(), whole, rtol=0, atol=0.02)


@pytest.mark.parametrize("latent", [False, True])
def test_attention_operator_has_a_fake_that_agrees(latent: bool) -> None:
    q, k = randn(2, 3, 32), randn(2, 1, 32)
    k_cache, v_cache = (torch.zeros(9, 1, 32).bfloat16() for _ in range(2))
    slots, rows, lengths = torch.tensor([1, 5]), torch.arange(2), torch.ones(2, dtype=torch.int64)
    batch = (slots, slots.to(torch.int32)[:, None], rows, lengths, lengths)
    tensors = (q, k, None, k_cache, None) if latent else (q, k, k, k_cache, v_cache)
    args = (*tensors, *batch, 1.0, 24 if latent else 32, 4)
    torch.library.opcheck(torch.ops.srt.attention.default, args)


def test_pool_size() -> None:
    layout = KVLayout(num_layers=2, num_kv_heads=3, k_head_dim=32, v_head_dim=24)
    pool = TokenToKVPool(10, layout, torch.bfloat16)
    keys, values = pool.get_kv_buffer(1)
    assert values is not None
    assert keys.shape == (11, 3, 32)
    assert values.shape == (11, 3, 24)
    held = [t for t in (*pool.k_buffer, *pool.v_buffer) if t is not None]
    assert sum(t.nbytes for t in held) == 11 * layout.bytes_per_token(2)


def test_pool_of_latent_attention_holds_keys_only() -> None:
    config = {
        "num_hidden_layers": 2,
        "num_attention_heads": 16,
        "num_key_value_heads": 16,
        "hidden_size": 2048,
        "kv_lora_rank": 512,
        "qk_rope_head_dim": 64,
    }
    layout = get_kv_layout(config)
    assert layout.bytes_per_token(2) == 2 * 2 * 576
    keys, values = TokenToKVPool(10, layout, torch.bfloat16).get_kv_buffer(1)
    assert keys.shape == (11, 1, 576)
    assert values is None
