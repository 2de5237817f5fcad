"""Checkpoints that the tools themselves wrote (`scripts/make_format_fixtures.py`): each runs, gives
the logits of transformers' model over weights that are dequantised here, and is understood by
`srt inspect`.
"""

import json
from pathlib import Path

import pytest
import torch
from safetensors.torch import load_file
from torch import Tensor

from srt.cli.main import main
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_models import Session, reference_log_probs

register_cpu_ci(est_time=15, suite="per-commit")

DATA = Path(__file__).parent / "data/formats"
FIXTURES = sorted(path.name for path in DATA.iterdir())
SCALES = ("weight_scale", "weight_scale_inv")
TOKENS = torch.randint(0, 64, (24,), generator=torch.Generator().manual_seed(3)).tolist()
PROMPT_LEN = 19

# Largest difference of a log-probability; weights are larger here than in other tests.
TOLERANCES = {"float32": 2e-4, "float16": 0.05, "bfloat16": 0.3}

# What `srt inspect` says of the weights.
SCHEMES = {
    "llmcompressor-0.14.0.1-block": "fp8 per-tensor",
    "llmcompressor-0.14.0.1-dynamic": "fp8 per-channel",
    "llmcompressor-0.14.0.1-groups": "fp8 per-block, fp8 per-channel, fp8 per-tensor",
    "llmcompressor-0.14.0.1-static-kv": "fp8 per-tensor",
    "modelopt-0.47.0-block": "fp8 per-block, fp8 per-tensor",
    "modelopt-0.47.0-channel": "fp8 per-channel",
    "modelopt-0.47.0-fp8-kv": "fp8 per-tensor",
    "transformers-5.24.0-block": "fp8 per-block",
    "transformers-5.24.0-skip": "fp8 per-block",
    "transformers-5.24.0-tensor": "fp8 per-tensor",
    "transformers-5.24.0-ue8m0": "fp8 per-block",
}


def dequantize(path: Path, block: tuple[int, int] | None = None) -> dict[str, Tensor]:
    """The float32 weights that a checkpoint stands for. Scales are spread evenly over the weight's
    rows and columns, or in blocks of a given size, of which the last may be smaller.
    """
    tensors = load_file(path / "model.safetensors")
    weights = {}
    for name, weight in tensors.items():
        module, _, leaf = name.rpartition(".")
        if leaf not in ("weight", "bias"):
            continue
        full = weight.float()
        scale = next((tensors[f"{module}.{s}"] for s in SCALES if f"{module}.{s}" in tensors), None)
        if scale is not None:
            n, k = weight.shape
            grid = scale.float().reshape(scale.shape[0] if scale.dim() else 1, -1)
            block_n, block_k = block or (n // grid.shape[0], k // grid.shape[1])
            rows = grid.repeat_interleave(block_n if grid.shape[0] > 1 else n, 0)[:n]
            full = full * rows.repeat_interleave(block_k if grid.shape[1] > 1 else k, 1)[:, :k]
        weights[name] = full
    return weights


def reference(path: Path) -> tuple[Tensor, int]:
    """(log-probabilities `[T, vocab_size]` after each of TOKENS, modules in FP8)."""
    config = json.loads((path / "config.json").read_text())
    for key in ("quantization_config", "dtype"):  # the reference is in float32
        config.pop(key, None)
    # ModelOpt's blocks are 128 x 128, of which the file says nothing.
    weights = dequantize(path, (128, 128) if path.name == "modelopt-0.47.0-block" else None)
    stored = load_file(path / "model.safetensors").values()
    count = sum(tensor.dtype == torch.float8_e4m3fn for tensor in stored)
    return reference_log_probs(config, weights, TOKENS), count


def test_every_tool_has_its_fixtures() -> None:
    assert set(SCHEMES) == set(FIXTURES)


@pytest.mark.parametrize("name", FIXTURES)
def test_logits(name: str) -> None:
    expected, count = reference(DATA / name)
    assert count >= 7  # else this compares unquantized models
    for dtype in TOLERANCES:
        session = Session(DATA / name, dtype)
        found = [session.prefill(TOKENS[:PROMPT_LEN])]
        found += [session.decode(token) for token in TOKENS[PROMPT_LEN:]]
        difference = (torch.stack(found) - expected[PROMPT_LEN - 1 :]).abs().max()
        assert difference < TOLERANCES[dtype], (dtype, difference)
        graphs = session.runner.runner.step_graph_runner
        assert graphs is not None
        # Where shards differ too, decode is recorded; in float32 Torch multiplies.
        assert (graphs.recorded_sizes == (1,)) == (dtype != "float32"), graphs.refusal


@pytest.mark.parametrize("name", FIXTURES)
def test_inspection(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(DATA / name), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["runs_here"] is True, report["problems"]
    assert report["scheme"] == SCHEMES[name]


def test_cache_scales_are_found() -> None:
    """By an FP8 cache, whose logits differ from those of a 16-bit one by its rounding only."""
    for name in ("llmcompressor-0.14.0.1-static-kv", "modelopt-0.47.0-fp8-kv"):
        expected, _ = reference(DATA / name)
        session = Session(DATA / name, "float16", kv_cache_dtype="fp8_e4m3")
        scales = [session.runner.runner.kv_pool.get_kv_scales(i) for i in range(2)]
        stored = load_file(DATA / name / "model.safetensors")
        wanted = sorted(float(stored[n]) for n in stored if n.endswith((".k_scale", ".v_scale")))
        assert sorted(value for pair in scales for value in pair) == pytest.approx(wanted)
        found = session.prefill(TOKENS)
        assert (found - expected[-1]).abs().max() < 0.5
