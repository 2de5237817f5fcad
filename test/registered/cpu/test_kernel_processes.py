"""The ops from many threads, in forked processes, and on processors without AVX2."""

import os
import platform
import shutil
import subprocess
import sys
import threading
import time

import pytest
import torch

import sgl_kernel
from sgl_kernel.testing import isa, random_weight
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=90, suite="per-commit")

TIERS: list[str] = sgl_kernel.cpu_info()["tiers_available"]
PYTHON_THREADS = 16


class _Calls:
    """One call of each kind over shared weights, and the bits that it gives alone."""

    def __init__(self) -> None:
        e4m3 = random_weight(torch.float8_e4m3fn, 96, 160)
        self.fp8 = sgl_kernel.convert_weight_packed(e4m3)
        self.bf16 = sgl_kernel.convert_weight_packed(random_weight(torch.bfloat16, 100, 160))
        self.scales = torch.rand(2, 2)
        self.inputs = [torch.randn(m, 160, dtype=torch.bfloat16) for m in (1, 3, 5, 40)]
        self.expected = [self.run(i) for i in range(len(self.inputs))]

    def run(self, i: int) -> tuple[torch.Tensor, ...]:
        x = self.inputs[i]
        out = torch.empty(2, x.shape[0], 96, dtype=torch.bfloat16)
        both = self.fp8.unsqueeze(0).repeat(2, 1, 1)
        sgl_kernel.bmm_cpu(out, x.expand(2, -1, -1), both, True, self.scales[0])
        return (
            sgl_kernel.fp8_scaled_mm_cpu(x, self.fp8, self.scales, [64, 128], None, x.dtype, True),
            sgl_kernel.weight_packed_linear(x, self.bf16, None, True),
            out,
        )

    def same(self, i: int) -> bool:
        return all(map(torch.equal, self.run(i), self.expected[i]))


def _from_many_threads(seconds: float) -> None:
    calls = _Calls()
    end = time.monotonic() + seconds
    wrong: list[int] = []
    done = [0] * PYTHON_THREADS

    def work(thread: int) -> None:
        while time.monotonic() < end:
            i = (thread + done[thread]) % len(calls.inputs)
            if not calls.same(i):
                wrong.append(i)
            done[thread] += 1

    threads = [threading.Thread(target=work, args=(t,)) for t in range(PYTHON_THREADS)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not wrong
    assert all(done)


@pytest.mark.parametrize("tier", TIERS)
def test_many_python_threads_share_weights(tier: str) -> None:
    with isa(tier):
        _from_many_threads(1.0)


@pytest.mark.parametrize("tier", TIERS)
def test_torchs_own_products_in_between(tier: str) -> None:
    """Torch's bf16 products use AMX too where there is one, and configure its tiles otherwise."""
    calls = _Calls()
    x, w = torch.randn(64, 160, dtype=torch.bfloat16), torch.randn(96, 160, dtype=torch.bfloat16)
    torchs = torch.nn.functional.linear(x, w)
    with isa(tier):
        calls.expected = [calls.run(i) for i in range(len(calls.inputs))]
        for i in range(20):
            assert calls.same(i % len(calls.inputs))
            assert torch.equal(torch.nn.functional.linear(x, w), torchs)


@pytest.mark.slow
def test_many_python_threads_share_weights_for_a_minute() -> None:
    _from_many_threads(60.0)


FORK = """
import multiprocessing, torch, sgl_kernel
from sgl_kernel.testing import random_weight

weight = sgl_kernel.convert_weight_packed(random_weight(torch.float8_e4m3fn, 64, 96))
x = torch.randn(9, 96, dtype=torch.bfloat16)

def product():
    return sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
        x, weight, torch.tensor(0.1), None, torch.float32, True
    )

def child(queue):
    # As a DataLoader worker does: the parent's pool of OpenMP threads does not survive the fork.
    torch.set_num_threads(1)
    queue.put(product().tolist())

expected = product()  # the parent has used the ops, threads and tiles included
context = multiprocessing.get_context("fork")
queue = context.Queue()
workers = [context.Process(target=child, args=(queue,)) for _ in range(2)]
for worker in workers:
    worker.start()
results = [queue.get(timeout=60) for _ in workers]
for worker in workers:
    worker.join()
assert all(torch.equal(torch.tensor(r), expected) for r in results)
assert torch.equal(product(), expected)
print("same bits")
"""


@pytest.mark.parametrize("tier", TIERS)
def test_fork_after_first_use(tier: str) -> None:
    done = subprocess.run(
        [sys.executable, "-c", FORK],
        env={**os.environ, "SGL_KERNEL_ISA": tier},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "same bits"


WITHOUT_AVX = """
import torch, sgl_kernel
info = sgl_kernel.cpu_info()
assert info["tier"] == "scalar", info
assert info["tiers_unavailable"]["avx2"] == "the CPU lacks AVX2", info
codes = torch.arange(256, dtype=torch.uint8).view(256, 1).view(torch.float8_e4m3fn)
got = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(
    torch.ones(5, 1, dtype=torch.bfloat16), codes, torch.tensor(1.0), None, torch.float32, False
)
torch.testing.assert_close(got, codes.float().view(1, 256).expand(5, 256), equal_nan=True)
print(info["tier"])
"""


@pytest.mark.skipif(platform.machine() != "x86_64", reason="needs an x86-64 machine")
@pytest.mark.skipif(shutil.which("qemu-x86_64") is None, reason="needs qemu-x86_64 (qemu-user)")
def test_a_processor_without_avx_runs_the_scalar_tier() -> None:
    """Under an emulated Nehalem any AVX instruction ends the process, static initialisers too."""
    environment = {k: v for k, v in os.environ.items() if k != "SGL_KERNEL_ISA"}
    done = subprocess.run(
        ["qemu-x86_64", "-cpu", "Nehalem", sys.executable, "-c", WITHOUT_AVX],
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "scalar"
