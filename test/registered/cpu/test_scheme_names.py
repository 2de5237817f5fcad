"""What `srt inspect` calls the schemes of real quantizers, told from tensors alone."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from srt.inspection.report import inspect_model
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG

register_cpu_ci(est_time=4, suite="per-commit")

N, K = 128, 256
DTYPES = {
    "u8": torch.uint8,
    "i8": torch.int8,
    "i32": torch.int32,
    "i64": torch.int64,
    "f16": torch.float16,
    "f32": torch.float32,
    "bf16": torch.bfloat16,
    "e4m3": torch.float8_e4m3fn,
    "e5m2": torch.float8_e5m2,
    "e8m0": torch.float8_e8m0fnu,
}
Spec = tuple[str, tuple[int, ...]]

# Scheme -> (quantization block, tensors of a linear layer as its writer names them).
SCHEMES: dict[str, tuple[dict[str, Any], dict[str, Spec]]] = {
    "int4 GPTQ": (
        {"quant_method": "gptq", "bits": 4, "group_size": 128},
        {
            "qweight": ("i32", (K // 8, N)),
            "qzeros": ("i32", (2, N // 8)),
            "scales": ("f16", (2, N)),
            "g_idx": ("i32", (K,)),
        },
    ),
    "int8 GPTQ": (
        {"quant_method": "gptq", "bits": 8},
        {"qweight": ("i32", (K // 4, N)), "scales": ("f16", (2, N)), "g_idx": ("i32", (K,))},
    ),
    "int4 AWQ": (
        {"quant_method": "awq", "bits": 4},
        {
            "qweight": ("i32", (K, N // 8)),
            "qzeros": ("i32", (2, N // 8)),
            "scales": ("f16", (2, N)),
        },
    ),
    "int4 compressed-tensors": (
        {
            "quant_method": "compressed-tensors",
            "format": "pack-quantized",
            "config_groups": {"group_0": {"weights": {"num_bits": 4, "type": "int"}}},
        },
        {
            "weight_packed": ("i32", (N, K // 8)),
            "weight_scale": ("bf16", (N, 2)),
            "weight_shape": ("i64", (2,)),
        },
    ),
    "NVFP4": (  # ModelOpt's
        {"quant_method": "modelopt", "quant_algo": "NVFP4"},
        {
            "weight": ("u8", (N, K // 2)),
            "weight_scale": ("e4m3", (N, K // 16)),
            "weight_scale_2": ("f32", ()),
            "input_scale": ("f32", ()),
        },
    ),
    "NVFP4 ": (  # llm-compressor's
        {"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"},
        {
            "weight_packed": ("u8", (N, K // 2)),
            "weight_scale": ("e4m3", (N, K // 16)),
            "weight_global_scale": ("f32", (1,)),
        },
    ),
    "MXFP4": (  # gpt-oss
        {"quant_method": "mxfp4"},
        {
            "gate_up_proj_blocks": ("u8", (4, N, K // 32, 16)),
            "gate_up_proj_scales": ("u8", (4, N, K // 32)),
        },
    ),
    "MXFP4 ": (  # Quark's
        {"quant_method": "quark"},
        {"weight": ("u8", (N, K // 2)), "weight_scale": ("e8m0", (N, K // 32))},
    ),
    "MXFP8": (
        {"quant_method": "modelopt", "quant_algo": "MXFP8"},
        {"weight": ("e4m3", (N, K)), "weight_scale": ("u8", (N, K // 32))},
    ),
    "NF4 bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_4bit": True},
        {
            "weight": ("u8", (N * K // 2, 1)),
            "weight.absmax": ("u8", (512,)),
            "weight.quant_map": ("f32", (16,)),
            "weight.quant_state.bitsandbytes__nf4": ("u8", (100,)),
        },
    ),
    "int8 bitsandbytes": (
        {"quant_method": "bitsandbytes", "load_in_8bit": True},
        {"weight": ("i8", (N, K)), "SCB": ("f32", (N,)), "weight_format": ("u8", ())},
    ),
    "int8 per-channel": (
        {"quant_method": "compressed-tensors", "format": "int-quantized"},
        {"weight": ("i8", (N, K)), "weight_scale": ("bf16", (N, 1))},
    ),
    "fp8 E5M2 per-tensor": (
        {"quant_method": "fp8", "fmt": "e5m2"},
        {"weight": ("e5m2", (N, K)), "weight_scale": ("f32", ())},
    ),
    "fp8 per-tensor with zero point": (
        {"quant_method": "fp8"},
        {
            "weight": ("e4m3", (N, K)),
            "weight_scale": ("f32", ()),
            "weight_zero_point": ("e4m3", ()),
        },
    ),
    "fp8 per-group of 64": (
        {"quant_method": "fp8"},
        {"weight": ("e4m3", (N, K)), "weight_scale": ("f32", (N, K // 64))},
    ),
    "fp8 with a scale of shape [5]": (
        {"quant_method": "fp8"},
        {"weight": ("e4m3", (N, K)), "weight_scale": ("f32", (5,))},
    ),
    "fp8 without scale": ({"quant_method": "fp8"}, {"weight": ("e4m3", (N, K))}),
    "EXL2": (
        {"quant_method": "exl2"},
        {"q_weight": ("i32", (9, N)), "q_scale": ("i32", (2, N // 8))},
    ),
    "AQLM": (
        {"quant_method": "aqlm"},
        {"codes": ("i8", (N, K // 8, 1)), "codebooks": ("f16", (1, 256, 1, 8))},
    ),
}


def write(directory: Path, quantization: dict[str, Any], layer: dict[str, Spec]) -> Path:
    config = {**TINY_CONFIG, "quantization_config": quantization}
    (directory / "config.json").write_text(json.dumps(config))
    tensors = {
        f"model.layers.{i}.mlp.down_proj.{name}": torch.zeros(shape).to(DTYPES[dtype])
        for i in range(2)
        for name, (dtype, shape) in layer.items()
    }
    tensors["model.embed_tokens.weight"] = torch.zeros(4, 4, dtype=torch.bfloat16)
    save_file(tensors, directory / "model.safetensors")
    return directory


@pytest.mark.parametrize("scheme", SCHEMES)
def test_scheme(scheme: str, tmp_path: Path) -> None:
    inspection = inspect_model(write(tmp_path, *SCHEMES[scheme]))
    found = {group.scheme: group.count for group in inspection.modules}
    assert found == {scheme.strip(): 2, "unquantized": 1}
    assert inspection.scheme == scheme.strip()
    assert len(inspection.problems) == 1


@pytest.mark.parametrize("scheme", ["int4 GPTQ", "MXFP4", "NVFP4", "fp8 E5M2 per-tensor"])
def test_scheme_is_told_without_a_configuration(scheme: str, tmp_path: Path) -> None:
    write(tmp_path, *SCHEMES[scheme])
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG))
    inspection = inspect_model(tmp_path)
    assert inspection.scheme == scheme
    assert not inspection.runs_here
