"""The ops as Torch sees them: fake kernels, opcheck, tiers."""

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
from srt.test.kernels import all_ops, sample_calls

register_cpu_ci(est_time=30, suite="per-commit")

E4M3 = torch.float8_e4m3fn
TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]


@pytest.fixture(scope="module", autouse=True)
def _fakes() -> None:
    sgl_kernel.fakes.register()


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
