"""Tiny checkpoints of pairs of format and architecture, and how far our log-probabilities are from
transformers' own over the same weights.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file
from torch import Tensor

from srt.test.fp8_checkpoints import FORMATS, write_fp8_checkpoint
from srt.test.tiny_models import (
    ARCHITECTURES,
    VOCAB_SIZE,
    Session,
    make_tensors,
    reference_log_probs,
    vision_modules,
)

TOKENS = torch.randint(0, VOCAB_SIZE, (48,), generator=torch.Generator().manual_seed(7)).tolist()
PROMPT_LEN = 41

# Largest difference of a log-probability. In float32 only the order of sums differs; the others are
# what their roundings cost.
TOLERANCES = {"float32": 1e-4, "float16": 0.03, "bfloat16": 0.12}

# Format -> architectures that are published in it.
PUBLISHED: Mapping[str, tuple[str, ...]] = {
    "bf16": tuple(ARCHITECTURES),
    "mistral-hf": ("ministral3", "mistral3", "mistral"),
    "mistral-hf-channel": ("mistral3",),
    "mistral-own": ("ministral3", "mistral"),
    "autofp8-static": ("llama", "mistral", "qwen2"),
    "autofp8-dynamic": ("llama", "mistral", "qwen2", "deepseek-v2"),
    "autofp8-kv": ("llama", "mistral"),
    "deepseek": ("deepseek-v2", "deepseek-v3", "deepseek-v3-plain", "qwen3"),
    "deepseek-small-blocks": ("deepseek-v3", "qwen3"),
    "qwen3": ("qwen3",),
    "compressed-tensors-static": ("llama", "mistral", "qwen2", "qwen3"),
    "compressed-tensors-dynamic": ("llama", "llama-tied", "mistral", "qwen2", "qwen3", "smollm3"),
    "compressed-tensors-block": ("llama", "qwen2-window", "qwen3"),
    "compression-config": ("llama", "mistral"),
    "modelopt": ("llama", "qwen3", "deepseek-v3"),
    "modelopt-channel": ("llama", "qwen3"),
    "modelopt-block": ("qwen3", "deepseek-v3"),
    "modelopt-in-config": ("llama", "qwen3"),
    "fbgemm": ("llama",),
}


@dataclass(frozen=True)
class ModelCase:
    """A checkpoint and the log-probabilities `[T, vocab_size]` after each of TOKENS."""

    path: Path
    expected: Tensor


def write_model(
    directory: Path, fmt: str, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
) -> dict[str, Tensor]:
    """Writes a checkpoint; returns the float32 weights that it stands for."""
    if fmt != "bf16":
        skip = vision_modules(tensors)
        return write_fp8_checkpoint(FORMATS[fmt], directory, config, tensors, skip=skip)
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "config.json").write_text(json.dumps(config))
    save_file(dict(tensors), directory / "model.safetensors")
    return {name: tensor.float() for name, tensor in tensors.items()}


def make_case(directory: Path, fmt: str, architecture: str) -> ModelCase:
    """A checkpoint of this format and architecture, with its reference."""
    config = ARCHITECTURES[architecture]
    weights = write_model(directory, fmt, config, make_tensors(config))
    return ModelCase(directory, reference_log_probs(config, weights, TOKENS))


def largest_difference(case: ModelCase, dtype: str) -> float:
    """Of a log-probability, over whole and chunked prefill and decode."""
    session = Session(case.path, dtype)
    prompt, last = TOKENS[:PROMPT_LEN], PROMPT_LEN - 1
    found = [session.prefill(prompt, chunk) for chunk in (7, 40, None)]
    expected = [case.expected[last]] * len(found)
    for position in range(PROMPT_LEN, len(TOKENS)):
        found.append(session.decode(TOKENS[position]))
        expected.append(case.expected[position])
    return float((torch.stack(found) - torch.stack(expected)).abs().max())
