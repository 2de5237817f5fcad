"""The ops as Torch sees them: schemas, fake kernels, opcheck, tiers."""

import os
import subprocess
import sys
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

import sgl_kernel
from sgl_kernel.testing import random_weight
from srt.test.ci_register import register_cpu_ci
from srt.test.kernel_calls import all_ops, sample_calls

register_cpu_ci(est_time=30, suite="per-commit")

E4M3 = torch.float8_e4m3fn
TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]


SCHEMAS = {
    "decode_attention_cpu": "(Tensor query, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor(c!) output, Tensor? key, Tensor? value, Tensor? loc, Tensor? attn_logits, "
    "Tensor req_to_token, Tensor req_pool_indices, Tensor seq_lens, float sm_scale, "
    "float logit_cap, int sliding_window=0, Tensor? sinks=None, float k_scale=1., "
    "float v_scale=1.) -> ()",
    "extend_attention_cpu": "(Tensor q_extend, Tensor? k_extend, Tensor? v_extend, "
    "Tensor(a!) o_extend, Tensor k_buffer, Tensor v_buffer, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor extend_seq_lens, Tensor extend_start_loc, "
    "int max_len_extend, float sm_scale, float logit_cap, int sliding_window=0, "
    "Tensor? sinks=None, float k_scale=1., float v_scale=1.) -> ()",
    "fused_qkv_attention_cpu": "(Tensor(a!) qkv, Tensor positions, Tensor cos_sin_cache, "
    "bool is_neox, int num_heads, int num_kv_heads, Tensor? q_weight, Tensor? k_weight, float eps, "
    "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor indices, Tensor req_to_token, "
    "Tensor req_pool_indices, Tensor seq_lens, Tensor? extend_seq_lens, float sm_scale, "
    "float logit_cap=0., int sliding_window=0, Tensor? sinks=None, float k_scale=1., "
    "float v_scale=1., Tensor? q_scale=None) -> Tensor",
    "add_rmsnorm_cpu": "(Tensor input, Tensor(a!) residual, Tensor weight, float eps, "
    "ScalarType? out_dtype=None) -> Tensor",
    "fused_add_rmsnorm_cpu": "(Tensor(a!) input, Tensor(b!) residual, Tensor weight, float eps) "
    "-> ()",
    "fused_qk_norm_rope_store_cpu": "(Tensor(a!) qkv, Tensor positions, Tensor cos_sin_cache, "
    "bool is_neox, int num_heads, int num_kv_heads, Tensor? q_weight, Tensor? k_weight, float eps, "
    "Tensor(b!) k_cache, Tensor(c!) v_cache, Tensor indices, float k_scale=1., float v_scale=1., "
    "Tensor? q_scale=None) -> ()",
    "fused_qk_rmsnorm_cpu": "(Tensor q, Tensor k, Tensor q_weight, Tensor k_weight, float eps) -> "
    "(Tensor, Tensor)",
    "packed_embedding_cpu": "(Tensor indices, Tensor weight, bool is_vnni, "
    "ScalarType? out_dtype=None) -> Tensor",
    "rmsnorm_cpu": "(Tensor input, Tensor weight, float eps, ScalarType? out_dtype=None) -> Tensor",
    "rotary_embedding_cpu": "(Tensor positions, Tensor(a!) query, Tensor(b!) key, "
    "int head_size, Tensor cos_sin_cache, bool is_neox) -> (Tensor, Tensor)",
    "silu_and_mul_cpu": "(Tensor input, ScalarType? out_dtype=None) -> Tensor",
    "store_cache_cpu": "(Tensor k, Tensor v, Tensor(a!) k_cache, Tensor(b!) v_cache, "
    "Tensor indices, int? row_dim=None, float k_scale=1., float v_scale=1.) -> ()",
    "topk_softmax_cpu": "(Tensor hidden_states, Tensor gating_output, int topk, bool renormalize, "
    "Tensor? correction_bias=None) -> (Tensor, Tensor)",
    "bmm_cpu": "(Tensor(a!) out, Tensor mat1, Tensor mat2, bool is_vnni, Tensor? scale) -> ()",
    "concat_columns_cpu": "(Tensor first, Tensor second, Tensor? third=None) -> Tensor",
    "convert_weight_packed": "(Tensor weight) -> Tensor",
    "fp8_per_channel_scaled_mm_cpu": "(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, "
    "ScalarType out_dtype, bool is_vnni) -> Tensor",
    "fp8_per_tensor_scaled_mm_cpu": "(Tensor mat1, Tensor mat2, Tensor scales2, Tensor? bias, "
    "ScalarType out_dtype, bool is_vnni) -> Tensor",
    "fp8_scaled_mm_cpu": "(Tensor mat1, Tensor mat2, Tensor scales2, int[] block_size, "
    "Tensor? bias, ScalarType out_dtype, bool is_vnni) -> Tensor",
    "weight_packed_linear": "(Tensor mat1, Tensor mat2, Tensor? bias, bool is_vnni, "
    "ScalarType? out_dtype=None) -> Tensor",
}


def test_schemas_are_the_documented_ones() -> None:
    found = {op: str(getattr(torch.ops.sgl_kernel, op).default._schema) for op in all_ops()}
    assert found == {op: f"sgl_kernel::{op}{schema}" for op, schema in SCHEMAS.items()}


def test_every_op_has_a_wrapper() -> None:
    assert set(all_ops()) <= set(sgl_kernel.__all__)


@pytest.mark.parametrize("op", all_ops())
def test_fake_kernel_agrees_with_the_op(op: str) -> None:
    call = getattr(torch.ops.sgl_kernel, op)
    assert torch._library.simple_registry.singleton.find(f"sgl_kernel::{op}").fake_impl.kernel, (
        f"{op} has no fake kernel"
    )
    for arguments in sample_calls(op):
        real = call(*arguments)
        with FakeTensorMode() as mode:
            fake = call(*(mode.from_tensor(a) if torch.is_tensor(a) else a for a in arguments))
        if real is None:
            assert fake is None
            continue
        pairs = zip(fake, real, strict=True) if isinstance(real, tuple) else [(fake, real)]
        for f, r in pairs:
            assert (f.shape, f.dtype, f.stride()) == (r.shape, r.dtype, r.stride())


@pytest.mark.parametrize("op", all_ops())
def test_opcheck(op: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # To see whether an op changed an input, opcheck compares it with a copy through torch.allclose,
    # which Torch does not implement for float8. Compare the bytes instead: that is stricter.
    allclose = torch.allclose

    def compare(a: torch.Tensor, b: torch.Tensor, **tolerances: Any) -> bool:
        if a.dtype == E4M3:
            return torch.equal(a.view(torch.uint8), b.view(torch.uint8))
        return allclose(a, b, **tolerances)

    monkeypatch.setattr(torch, "allclose", compare)
    for arguments in sample_calls(op):
        torch.library.opcheck(getattr(torch.ops.sgl_kernel, op).default, arguments)


def test_compiles_without_graph_break() -> None:
    w = sgl_kernel.convert_weight_packed(random_weight(E4M3, 64, 32))
    scale = torch.tensor(0.1)

    def model(x: torch.Tensor) -> torch.Tensor:
        y = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(x, w, scale, None, x.dtype, True)
        return torch.nn.functional.silu(y)

    x = torch.randn(4, 32, dtype=torch.bfloat16)
    compiled = torch.compile(model, fullgraph=True, backend="aot_eager")
    torch.testing.assert_close(compiled(x), model(x), rtol=0, atol=0)


@pytest.mark.parametrize("tier", TIERS)
def test_isa_environment_variable_lowers_the_tier(tier: str) -> None:
    code = "import sgl_kernel; print(sgl_kernel.cpu_info()['tier'])"
    environment = {**os.environ, "SGL_KERNEL_ISA": tier}
    done = subprocess.run(
        [sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True
    )
    assert done.stdout.strip() == tier


def test_unknown_isa_fails_the_import_with_the_reason() -> None:
    environment = {**os.environ, "SGL_KERNEL_ISA": "sse9"}
    done = subprocess.run(
        [sys.executable, "-c", "import sgl_kernel"], env=environment, capture_output=True, text=True
    )
    assert done.returncode != 0
    assert "ImportError: SGL_KERNEL_ISA=sse9: no such tier; this machine can run scalar" in (
        done.stderr
    )


def test_cpu_info_tells_tier_and_reasons() -> None:
    info = sgl_kernel.cpu_info()
    assert info["tier"] in info["tiers_available"]
    assert info["tiers_available"][0] == "scalar"
    assert all(info["tiers_unavailable"].values())
    assert not set(info["tiers_available"]) & set(info["tiers_unavailable"])
    assert info["threads"] == torch.get_num_threads()
    assert info["version"] == sgl_kernel.__version__


def test_set_isa_refuses_what_cannot_run_and_keeps_the_tier() -> None:
    before = sgl_kernel.cpu_info()["tier"]
    with pytest.raises(RuntimeError, match="SGL_KERNEL_ISA=bogus: no such tier"):
        sgl_kernel.set_isa("bogus")
    assert sgl_kernel.cpu_info()["tier"] == before
