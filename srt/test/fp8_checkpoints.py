"""Writes one set of weights as a checkpoint of any FP8 format in use (docs/formats.md).

    dequantized = write_fp8_checkpoint(FORMATS["deepseek"], path, hf_config, weights)

The linear layers of the decoder become FP8, each with scales of its own; everything else becomes
bfloat16. What comes back are the float32 weights that the files stand for, under the same names:
load them into transformers' model and its logits are the reference.
"""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from srt.test.fp8_formats import FORMATS, Fp8Format
from srt.test.mistral_form import to_mistral_names, to_params

__all__ = ["FORMATS", "Fp8Format", "is_linear", "quantize", "write_fp8_checkpoint"]

E4M3 = torch.float8_e4m3fn
FP8_MAX = torch.finfo(E4M3).max
_LINEAR = re.compile(r"(?:^|\.)layers\.\d+\.(?:.+\.)?([^.]+)\.weight$")
# Matrices of decoder layers that no checkpoint quantizes: the routers of mixtures of experts.
_NEVER_QUANTIZED = ("gate", "router")


def is_linear(name: str, weight: Tensor) -> bool:
    """Whether the tensor is the weight of a linear layer of a decoder layer."""
    match = _LINEAR.search(name)
    return weight.dim() == 2 and match is not None and match[1] not in _NEVER_QUANTIZED


def quantize(weight: Tensor, fmt: Fp8Format, stretch: float = 1.0) -> tuple[Tensor, Tensor, Tensor]:
    """(e4m3 codes `[N, K]`, scale as stored, float32 weight that both stand for).

    `stretch` >= 1 multiplies every scale, so that scales differ where the weights' sizes do not.
    """
    n, k = weight.shape
    block_n, block_k = fmt.block[0] or n, fmt.block[1] or k
    row, column = torch.arange(n) // block_n, torch.arange(k) // block_k
    grid = torch.zeros(int(row[-1]) + 1, int(column[-1]) + 1)
    index = (row[:, None] * grid.shape[1] + column).flatten()
    grid.view(-1).scatter_reduce_(0, index, weight.float().abs().flatten(), "amax")
    scale = (grid / FP8_MAX * stretch).clamp(min=1e-6).to(fmt.scale_dtype)
    full = scale.float()[row][:, column]
    codes = (weight.float() / full).clamp(-FP8_MAX, FP8_MAX).to(E4M3)
    return codes, scale.reshape(_stored_shape(grid, fmt)).clone(), codes.float() * full


def _stored_shape(grid: Tensor, fmt: Fp8Format) -> tuple[int, ...]:
    rows, columns = grid.shape
    if fmt.block == (None, None):
        return (1,) * fmt.scale_rank
    return {1: (rows,), 2: (rows, columns), 4: (rows, 1, columns, 1)}[fmt.scale_rank]


def write_fp8_checkpoint(
    fmt: Fp8Format,
    directory: Path,
    hf_config: Mapping[str, Any],
    weights: Mapping[str, Tensor],
    *,
    skip: Iterable[str] = (),
    activation_scale: float = 1e6,
) -> dict[str, Tensor]:
    """Writes configuration and weights of a checkpoint.

    Args:
        fmt: One of FORMATS, or a variation of it (`dataclasses.replace`).
        directory: Made if it does not exist.
        hf_config: Content of config.json without quantization.
        weights: All weights by their names in transformers, of any floating-point dtype.
        skip: Modules of `weights` that stay bfloat16, besides those that are not linear layers. The
            format's skip list names them, if it has one.
        activation_scale: Value of the activation and cache scales, which must not matter.

    Returns:
        The float32 weights that the checkpoint stands for.
    """
    skip = tuple(skip)
    tensors: dict[str, Tensor] = {}
    dequantized: dict[str, Tensor] = {}
    for i, (name, weight) in enumerate(weights.items()):
        module = name.removesuffix(".weight")
        if not is_linear(name, weight) or module in skip:
            tensors[name] = weight.to(torch.bfloat16)
            dequantized[name] = tensors[name].float()
            continue
        codes, scale, dequantized[name] = quantize(weight, fmt, stretch=1 + (i % 5) / 4)
        tensors[name], tensors[f"{module}.{fmt.scale_name}"] = codes, scale
        if fmt.input_scale:
            tensors[f"{module}.{fmt.input_scale}"] = torch.tensor(activation_scale)
        parent, _, leaf = module.rpartition(".")
        if leaf == "o_proj":
            for cache_scale in fmt.cache_scales:
                tensors[f"{parent}.{cache_scale}"] = torch.tensor(activation_scale)
    directory.mkdir(parents=True, exist_ok=True)
    if fmt.mistral_form:
        params = to_params(hf_config) | {"quantization": dict(fmt.quantization)}
        _write_json(directory / "params.json", params)
        _save(to_mistral_names(tensors, hf_config), directory / "consolidated.safetensors")
        return dequantized
    quantization = dict(fmt.quantization)
    if fmt.skip_key is not None:
        quantization[fmt.skip_key] = [*fmt.skip_always, *skip]
    config = dict(hf_config)
    if fmt.config_key is not None:
        config[fmt.config_key] = quantization
    else:
        content = {"producer": {"name": "modelopt"}, "quantization": quantization}
        _write_json(directory / "hf_quant_config.json", content)
    _write_json(directory / "config.json", config)
    _save(tensors, directory / "model.safetensors")
    return dequantized


def _write_json(file: Path, content: Mapping[str, Any]) -> None:
    file.write_text(json.dumps(content, indent=2))


def _save(tensors: Mapping[str, Tensor], file: Path) -> None:
    contiguous = {name: value.contiguous() for name, value in tensors.items()}
    save_file(contiguous, file, metadata={"format": "pt"})
