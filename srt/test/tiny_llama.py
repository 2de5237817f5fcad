"""Tiny random Llama checkpoints, and transformers' own model over the same weights as the
reference.
"""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from srt.test import tiny_models
from srt.test.tiny_models import make_tensors

__all__ = [
    "TINY_CONFIG",
    "dequantize",
    "make_tensors",
    "quantize",
    "reference_model",
    "write_checkpoint",
]

FP8_MAX = torch.finfo(torch.float8_e4m3fn).max

# Sizes that no block or vector width divides.
TINY_CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 1007,
    "hidden_size": 96,
    "intermediate_size": 200,
    "num_hidden_layers": 2,
    "num_attention_heads": 3,
    "num_key_value_heads": 1,
    "head_dim": 32,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
    "rope_theta": 10000.0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}


def quantize(
    tensors: dict[str, Tensor],
    *,
    scale_name: str = "weight_scale",
    scale_shape: tuple[int, ...] = (),
    scale_dtype: torch.dtype = torch.float32,
    per_channel: bool = False,
    skip: Iterable[str] = ("lm_head",),
) -> dict[str, Tensor]:
    """The linear layers of `tensors` in FP8; `scale_shape` is that of a per-tensor scale, or
    `(-1,)` or `(-1, 1)` per channel.
    """
    result = {}
    for name, value in tensors.items():
        module = name.removesuffix(".weight")
        if "_proj" not in name or not name.endswith(".weight") or any(s in module for s in skip):
            result[name] = value
            continue
        rows = value.float()
        largest = rows.abs().amax(dim=1, keepdim=True) if per_channel else rows.abs().amax()
        scale = (largest / FP8_MAX).to(scale_dtype)
        result[name] = (rows / scale.float()).clamp(-FP8_MAX, FP8_MAX).to(torch.float8_e4m3fn)
        result[f"{module}.{scale_name}"] = scale.reshape(scale_shape).clone()
    return result


def dequantize(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """All weights in float32, FP8 ones multiplied by their scales; without the scales."""
    result = {}
    for name, value in tensors.items():
        if "_scale" in name:
            continue
        result[name] = value.float()
        if value.dtype == torch.float8_e4m3fn:
            module = name.removesuffix(".weight")
            scale = next(
                tensors[f"{module}.{s}"]
                for s in ("weight_scale", "weight_scale_inv")
                if f"{module}.{s}" in tensors
            )
            result[name] = result[name] * scale.float().reshape(-1, 1)
    return result


def write_checkpoint(
    directory: Path,
    config: dict[str, Any],
    tensors: dict[str, Tensor],
    quantization: dict[str, Any] | None = None,
) -> Path:
    """Writes config.json and one model.safetensors; returns the directory."""
    directory.mkdir(parents=True, exist_ok=True)
    content = dict(config)
    if quantization is not None:
        content["quantization_config"] = quantization
    (directory / "config.json").write_text(json.dumps(content, indent=2))
    save_file(
        {name: value.contiguous() for name, value in tensors.items()},
        directory / "model.safetensors",
        metadata={"format": "pt"},
    )
    return directory


def reference_model(directory: Path) -> Any:
    """transformers' model in float32 over the dequantised weights of a checkpoint with one or
    several files.
    """
    config = json.loads((directory / "config.json").read_text())
    for key in ("quantization_config", "torch_dtype", "dtype"):
        config.pop(key, None)
    tensors: dict[str, Tensor] = {}
    for file in sorted(directory.glob("*.safetensors")):
        tensors |= load_file(file)
    return tiny_models.reference_model(config, dequantize(tensors))
