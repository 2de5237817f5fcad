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

from srt.checkpoint.kv_layout import KVLayout, get_kv_layout
from srt.errors import UnsupportedConfigError
from srt.layers.activation import SiluAndMul
from srt.layers.layernorm import RMSNorm
from srt.layers.rotary_embedding import get_rope
from srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from srt.mem_cache.memory_pool import TokenToKVPool
from srt.model_executor.fast_attributes import flatten_attributes
from srt.test.ci_register import register_cpu_ci
from srt.utils.tensor_parallel import TensorParallel

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
    rope.prepare(100_001)
    out, _ = rope(positions, x, x)
    # float32 angles near 1e5 differ by their last bit when the frequencies do.
    torch.testing.assert_close(out, expected, rtol=0, atol=0.05)
    torch.testing.assert_close(out[:3], expected[:3], rtol=0, atol=1e-4)


def test_interleaved_rotation_is_a_complex_product() -> None:
    rope = get_rope(rope_config(YARN), 64, interleaved=True)
    positions = torch.tensor([0, 1, 77, 8191])
    x = randn(4, 3, 64, dtype=torch.float32)
    rope.prepare(8192)
    cos, sin = (rope.cos_sin_cache[1] / rope.attention_factor).double().chunk(2)
    angles = positions.double()[:, None, None] * torch.atan2(sin, cos)
    turned = torch.view_as_complex(x.double().unflatten(-1, (32, 2))) * torch.polar(
        torch.full_like(angles, rope.attention_factor), angles
    )
    out, _ = rope(positions, x, x)
    torch.testing.assert_close(
        out.double(), torch.view_as_real(turned).flatten(-2), rtol=0, atol=2e-3
    )


def test_partial_rotation_leaves_the_rest_alone() -> None:
    config = rope_config({"rope_theta": 1e4, "partial_rotary_factor": 0.5})
    rope, whole = get_rope(config, 64), get_rope(rope_config({"rope_theta": 1e4}), 32)
    positions, x = torch.tensor([3, 40]), randn(2, 3, 64, dtype=torch.float32)
    rope.prepare(41)
    whole.prepare(41)
    out, _ = rope(positions, x, x)
    expected, _ = whole(positions, x[..., :32], x[..., :32])
    assert torch.equal(out[..., 32:], x[..., 32:])
    assert torch.equal(out[..., :32], expected)


def test_the_table_of_rotations_grows_where_it_is() -> None:
    rope = get_rope(rope_config({"rope_theta": 1e4}, 5000), 64)
    rope.prepare(1)
    before = rope.cos_sin_cache
    first = before[:1000].clone()
    for length in (1025, 1026, 5000):
        rope.prepare(length)
        assert rope.cos_sin_cache is before
        assert before[:length].isfinite().all()
    assert torch.equal(before[:1000], first)
    torch.testing.assert_close(before[4999, 0], torch.tensor(4999.0).cos())


def test_queries_are_scaled_from_the_original_length_on() -> None:
    rope = get_rope(rope_config(YARN | {"llama_4_scaling_beta": 0.1}), 64)
    rope.prepare(8192)
    rope.prepare(16385)
    assert rope.query_scale is not None
    scale = rope.query_scale[[0, 8191, 8192, 16383, 16384]]
    expected = [1, 1, 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(2), 1 + 0.1 * math.log(3)]
    torch.testing.assert_close(scale, torch.tensor(expected))
    assert get_rope(rope_config(YARN), 64).query_scale is None


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
    embedding = VocabParallelEmbedding(
        vocab_size, hidden_size, torch.bfloat16, tp=TensorParallel(), packed=True
    )
    embedding.weight = torch.nn.Parameter(table.clone(), requires_grad=False)
    embedding.process_weights_after_loading()
    assert [held.nbytes for held in embedding.parameters()] == [table.nbytes]
    ids = torch.tensor([0, vocab_size - 1, 5, 5, 31])
    assert torch.equal(embedding(ids), table[ids])
    x = randn(3, hidden_size)
    logits = embedding.logits(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, x.float() @ table.float().T, rtol=1e-5, atol=1e-4)


def test_untied_head_gives_float32_logits() -> None:
    head = ParallelLMHead(96, 1007, tp=TensorParallel(), quant_config=None)
    table = randn(1007, 96)
    head.weight = torch.nn.Parameter(table.clone(), requires_grad=False)
    head.process_weights_after_loading()
    logits = head(randn(2, 96))
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits, randn(2, 96).float() @ table.float().T, rtol=1e-5, atol=1e-4)


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


def test_flattened_attributes_are_found_at_once_and_can_be_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    model = torch.nn.Sequential(torch.nn.Linear(3, 2), torch.nn.BatchNorm1d(2)).eval()
    x = randn(4, 3, dtype=torch.float32)
    expected = model(x)
    flatten_attributes(model)
    with monkeypatch.context() as patched:
        patched.delattr(torch.nn.Module, "__getattr__")
        assert torch.equal(model(x), expected)
    weight = torch.nn.Parameter(torch.zeros(2, 3))
    model[0].weight = weight
    assert model[0].weight is weight
    assert not torch.equal(model(x), expected)
