"""Logits of tiny Llama checkpoints against transformers in float32 over the dequantised weights."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srt.configs.model_config import ModelConfig
from srt.test.ci_register import register_cpu_ci
from srt.test.contiguous_runner import ContiguousRunner, DecodeInput, ExtendInput
from srt.test.tiny_llama import (
    TINY_CONFIG,
    make_tensors,
    quantize,
    reference_model,
    write_checkpoint,
)

register_cpu_ci(est_time=12, suite="per-commit")

PROMPT = torch.randint(
    0, TINY_CONFIG["vocab_size"], (23,), generator=torch.Generator().manual_seed(7)
).tolist()
NEW_TOKENS = torch.randint(0, 1007, (6,), generator=torch.Generator().manual_seed(8)).tolist()

# Of log-probabilities.
TOLERANCE = 0.008

LLAMA3_ROPE = {
    "rope_parameters": {
        "rope_type": "llama3",
        "rope_theta": 500.0,
        "factor": 4.0,
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 64,
    }
}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic", "ignored_layers": ["lm_head"]}
MISTRAL_FP8 = {
    "quant_method": "fp8",
    "activation_scheme": "static",
    "modules_to_not_convert": ["lm_head"],
}


def with_activation_scales(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    extra = {
        f"{name.removesuffix('.weight')}.{scale}": torch.tensor(1e6)
        for name in tensors
        if "_proj.weight" in name and "scale" not in name
        for scale in ("input_scale", "activation_scale")
    }
    return tensors | extra


# Name -> (changes of the configuration, quantization_config, change of the bf16 tensors).
CASES: dict[str, tuple[dict[str, Any], dict[str, Any] | None, Callable[..., Any]]] = {
    "bf16": ({}, None, dict),
    "bf16 tied": ({"tie_word_embeddings": True}, None, dict),
    "bf16 biases": ({"attention_bias": True, "mlp_bias": True}, None, dict),
    "bf16 llama3 rope": (LLAMA3_ROPE, None, dict),
    "bf16 two kv heads": (
        {"num_attention_heads": 6, "num_key_value_heads": 2, "head_dim": 16},
        None,
        dict,
    ),
    "fp8": ({}, FP8, quantize),
    "fp8 tied": ({"tie_word_embeddings": True}, FP8, quantize),
    "fp8 mistral": (
        {},
        MISTRAL_FP8,
        lambda t: with_activation_scales(quantize(t, scale_name="weight_scale_inv")),
    ),
    "fp8 scales [1, 1] in bf16": (
        {},
        FP8,
        lambda t: quantize(t, scale_shape=(1, 1), scale_dtype=torch.bfloat16),
    ),
    "fp8 per channel": ({}, FP8, lambda t: quantize(t, per_channel=True, scale_shape=(-1,))),
    "fp8 per channel [N, 1]": (
        {},
        FP8,
        lambda t: quantize(t, per_channel=True, scale_shape=(-1, 1)),
    ),
    "fp8 biases": ({"attention_bias": True, "mlp_bias": True}, FP8, quantize),
    "fp8 with a skipped layer": (
        {},
        FP8 | {"ignored_layers": ["lm_head", "model.layers.1.mlp"]},
        lambda t: quantize(t, skip=("lm_head", "layers.1.mlp")),
    ),
    "fp8 with a layer that dtype tells": (
        {},
        {"quant_method": "fp8"},
        lambda t: quantize(t, skip=("lm_head", "layers.0.mlp.down_proj")),
    ),
}


@pytest.fixture(scope="module", params=CASES, ids=str)
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    changes, quantization, convert = CASES[request.param]
    config = TINY_CONFIG | changes
    tensors = convert(make_tensors(config))
    return write_checkpoint(tmp_path_factory.mktemp("llama"), config, tensors, quantization)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ContiguousRunner:
    return ContiguousRunner(ModelConfig.from_pretrained(checkpoint), max_total_tokens=128)


@pytest.fixture(scope="module")
def reference(checkpoint: Path) -> Tensor:
    """Log-probabilities `[T, vocab_size]` after every token of PROMPT and NEW_TOKENS."""
    with torch.inference_mode():
        logits: Tensor = reference_model(checkpoint)(torch.tensor([PROMPT + NEW_TOKENS])).logits[0]
    return logits.log_softmax(-1)


def assert_close(logits: Tensor, reference: Tensor) -> None:
    """Within what float16 activations lose."""
    assert logits.dtype == torch.float32
    assert logits.shape == reference.shape
    assert (logits.log_softmax(-1) - reference).abs().max() < TOLERANCE


def test_prefill(runner: ContiguousRunner, reference: Tensor) -> None:
    logits = runner.extend([ExtendInput(PROMPT, 0, 1)])
    assert_close(logits, reference[[len(PROMPT) - 1]])


@pytest.mark.parametrize("chunk", [1, 7, 22])
def test_chunked_prefill(runner: ContiguousRunner, reference: Tensor, chunk: int) -> None:
    for start in range(0, len(PROMPT), chunk):
        part = PROMPT[start : start + chunk]
        logits = runner.extend([ExtendInput(part, start, 5)])
        assert_close(logits, reference[[start + len(part) - 1]])


def test_decode(runner: ContiguousRunner, reference: Tensor) -> None:
    runner.extend([ExtendInput(PROMPT, 0, 1)])
    for i, token in enumerate(NEW_TOKENS):
        position = len(PROMPT) + i
        logits = runner.decode([DecodeInput(token, position, 1)])
        assert_close(logits, reference[[position]])


def test_a_batch_computes_what_each_request_computes_alone(runner: ContiguousRunner) -> None:
    prompts = [PROMPT, PROMPT[5:9], PROMPT[:1]]
    starts = [1, 40, 60]
    alone = []
    for prompt, start in zip(prompts, starts, strict=True):
        rows = [runner.extend([ExtendInput(prompt, 0, start)])]
        rows += [
            runner.decode([DecodeInput(token, len(prompt) + i, start)])
            for i, token in enumerate(NEW_TOKENS)
        ]
        alone.append(rows)
    inputs = [ExtendInput(p, 0, s) for p, s in zip(prompts, starts, strict=True)]
    together = [runner.extend(inputs)]
    for i, token in enumerate(NEW_TOKENS):
        together.append(
            runner.decode(
                [DecodeInput(token, len(p) + i, s) for p, s in zip(prompts, starts, strict=True)]
            )
        )
    for step, logits in enumerate(together):
        expected = torch.cat([rows[step] for rows in alone])
        assert torch.equal(logits, expected)


def test_bfloat16(tmp_path: Path) -> None:
    path = write_checkpoint(tmp_path, TINY_CONFIG, quantize(make_tensors(TINY_CONFIG)), FP8)
    runner = ContiguousRunner(
        ModelConfig.from_pretrained(path, dtype="bfloat16"), max_total_tokens=64
    )
    with torch.inference_mode():
        reference = reference_model(path)(torch.tensor([PROMPT])).logits[0, -1:].log_softmax(-1)
    logits = runner.extend([ExtendInput(PROMPT, 0, 1)])
    # Its significand has three bits less than that of float16.
    assert (logits.log_softmax(-1) - reference).abs().max() < 8 * TOLERANCE


def test_activation_scales_change_nothing(tmp_path: Path) -> None:
    tensors = quantize(make_tensors(TINY_CONFIG))
    logits = []
    for name, content in (("without", tensors), ("with", with_activation_scales(tensors))):
        path = write_checkpoint(tmp_path / name, TINY_CONFIG, content, FP8)
        runner = ContiguousRunner(ModelConfig.from_pretrained(path), max_total_tokens=64)
        logits.append(runner.extend([ExtendInput(PROMPT, 0, 1)]))
    assert torch.equal(*logits)
