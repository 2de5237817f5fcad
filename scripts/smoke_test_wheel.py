#!/usr/bin/env python3
"""Check an installed kernel wheel with only Torch beside it: `python scripts/smoke_test_wheel.py`.

Run it under each Torch and Python that one wheel is to serve. It needs neither pytest nor srt.
"""

from __future__ import annotations

import platform

import torch

import sgl_kernel


def check_fp8_linear(M: int, N: int, K: int, packed: bool) -> None:
    """Compare the per-tensor op with the same product in float64; the weights are all FP8 codes."""
    codes = torch.arange(256, dtype=torch.uint8)
    codes = codes[(codes & 0x7F) != 0x7F]  # without the two NaN codes
    weight = codes.repeat(N * K // len(codes) + 1)[: N * K].view(torch.float8_e4m3fn).view(N, K)
    x = torch.randn(M, K, dtype=torch.bfloat16)
    scale, bias = torch.tensor([0.25]), torch.randn(N)

    mat2 = sgl_kernel.convert_weight_packed(weight) if packed else weight
    got = sgl_kernel.fp8_per_tensor_scaled_mm_cpu(x, mat2, scale, bias, torch.float32, packed)

    products = x.double(), weight.double() * 0.25
    expected = products[0] @ products[1].t() + bias.double()
    bound = products[0].abs() @ products[1].abs().t() + bias.double().abs()
    worst = ((got.double() - expected).abs() / bound).max().item()
    # float32 sums of K products: at most about K roundings of 2^-24 each.
    if not worst <= (K + 4) * 2.0**-24:
        raise SystemExit(f"M={M} N={N} K={K} packed={packed}: relative error {worst:.3g}")


def main() -> None:
    """Run the checks and print what they ran on."""
    torch.manual_seed(0)
    info = sgl_kernel.cpu_info()
    for tier in reversed(info["tiers_available"]):
        sgl_kernel.set_isa(tier)
        for M, N, K in ((1, 32, 64), (3, 33, 31), (40, 96, 576)):
            for packed in (False, True):
                check_fp8_linear(M, N, K, packed)
    print(
        f"ok: sgl_kernel {sgl_kernel.__version__}, torch {torch.__version__}, "
        f"Python {platform.python_version()}, tiers {', '.join(info['tiers_available'])}"
    )


if __name__ == "__main__":
    main()
