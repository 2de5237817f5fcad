"""What decides how packed parameters look, besides the checkpoint's bytes: the key of an entry in a
packed cache.

It holds the kernels' layout, options and configuration files, which tensor fills which parameter,
and the sources of the modules that turn these tensors into packed parameters, so that work on
anything else leaves the entries of a cache as they are.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

import sgl_kernel
from srt.checkpoint.config_files import CONFIG_FILE, MISTRAL_FILE, MODELOPT_FILE
from srt.checkpoint.files import lies_there, read_bytes
from srt.checkpoint.fingerprint import digest_bytes
from srt.configs.model_config import ModelConfig
from srt.model_loader.tensor_matching import ModulePlan
from srt.model_loader.tensors import digest_tensor

# Raise when entries change, or packed parameters for a reason outside of the sources below.
LAYOUT_VERSION = 3
# Sources, by patterns below `srt`, of what is between a tensor that is read and a packed parameter.
# A test finds those that are missing here.
LAYOUT_SOURCES = (
    "layers/dtypes.py",
    "layers/float32.py",
    "layers/latent_projection.py",
    "layers/layernorm.py",
    "layers/linear.py",
    "layers/parameter.py",
    "layers/quantization/*.py",
    "layers/vocab_parallel_embedding.py",
    "layers/weight_utils.py",
    "model_loader/loader.py",
    "model_loader/mistral_rows.py",
)
_PACKAGE = Path(__file__).parents[1]


def packed_layout_key(config: ModelConfig, plans: Sequence[ModulePlan]) -> dict[str, Any]:
    """What packed parameters depend on besides the checkpoint's bytes, as JSON can hold it.

    Args:
        config: The model's configuration.
        plans: Which tensors fill the parameters of its modules, on the meta device.
    """
    places = [
        (
            plan.name,
            type(plan.module).__name__,
            type(getattr(plan.module, "quant_method", None)).__name__,
            [(name, str(p.dtype), p.shape) for name, p in plan.module.named_parameters()],
            [(name, shard, meta.name, meta.dtype) for name, shard, meta in plan.sources],
        )
        for plan in plans
    ]
    names = (CONFIG_FILE, MODELOPT_FILE, MISTRAL_FILE)
    files = [config.path / name for name in names if lies_there(config.path / name)]
    return {
        "layout": [LAYOUT_VERSION, _sources_digest()],
        "kernels": [sgl_kernel.__version__, _kernels_digest()],
        "byte order": sys.byteorder,
        "options": {"dtype": str(config.dtype), "quantization": config.quantization},
        "configuration": {file.name: digest_bytes(read_bytes(file)) for file in files},
        "places": digest_bytes(json.dumps(places).encode()),
    }


def _sources_digest() -> str:
    files = sorted(file for pattern in LAYOUT_SOURCES for file in _PACKAGE.glob(pattern))
    return digest_bytes("".join(digest_bytes(file.read_bytes()) for file in files).encode())


def _kernels_digest() -> str:
    """Tells the kernels' packed layout by packing matrices that no block size divides."""
    digests = []
    for dtype in (torch.float8_e4m3fn, torch.bfloat16):
        codes = torch.arange(67 * 131 * dtype.itemsize, dtype=torch.int32).remainder(113)
        weight = codes.to(torch.uint8).view(dtype).view(67, 131)
        digests.append(digest_tensor(sgl_kernel.convert_weight_packed(weight)))
    return digest_bytes("".join(digests).encode())
