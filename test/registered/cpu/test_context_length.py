"""How long a sequence may be, and buffers of old checkpoints that follow from the configuration."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.checkpoint.context_length import get_context_length
from srt.cli.main import main
from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.inspection.report import inspect_model
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, write_checkpoint
from srt.test.tiny_models import Session, reference_log_probs

register_cpu_ci(est_time=6, suite="per-commit")

ORIGINAL = {"original_max_position_embeddings": 64}
YARN = {"rope_type": "yarn", "factor": 4.0} | ORIGINAL
LINEAR = {"rope_type": "linear", "factor": 4.0}

# max_position_embeddings, rotation, context.
CASES: dict[str, tuple[int, dict[str, Any] | None, int]] = {
    "plain": (64, None, 64),
    "YaRN, length before": (64, YARN, 256),
    "YaRN, length after": (256, YARN, 256),
    "YaRN, length between, as Qwen3": (80, YARN, 256),
    "YaRN, a longer length": (300, YARN, 300),
    "YaRN in the old spelling": (64, {"type": "yarn", "factor": 2} | ORIGINAL, 128),
    "YaRN without the original": (64, {"rope_type": "yarn", "factor": 4.0}, 256),
    "YaRN, an odd factor": (100, YARN | {"factor": 1.7}, 108),
    "linear": (64, LINEAR, 256),
    "linear with the original": (256, LINEAR | ORIGINAL, 256),
    "llama3": (256, YARN | {"rope_type": "llama3"}, 256),
    "dynamic": (64, {"rope_type": "dynamic", "factor": 4.0}, 64),
    "default": (64, {"rope_type": "default", "factor": 4.0}, 64),
    "no factor": (64, {"rope_type": "yarn"}, 64),
    "a bad factor": (64, YARN | {"factor": "4"}, 64),
}


@pytest.mark.parametrize("case", CASES)
@pytest.mark.parametrize("key", ["rope_scaling", "rope_parameters"])
def test_context_length(case: str, key: str) -> None:
    length, rope, expected = CASES[case]
    assert get_context_length({"max_position_embeddings": length, key: rope}) == expected


@pytest.mark.parametrize("length", [None, 0, True, "64", 6.5])
def test_no_length(length: object) -> None:
    assert get_context_length({"max_position_embeddings": length, "rope_scaling": YARN}) is None


@pytest.mark.parametrize(
    "rope",
    [
        {"factor": 1e9},
        {"factor": 1e300},
        {"factor": 1.7e308},
        {"factor": 10**400},
        {"original_max_position_embeddings": 10**400},
    ],
    ids=lambda rope: str(rope)[:40],
)
def test_a_context_that_nobody_means(rope: dict[str, Any], tmp_path: Path) -> None:
    """Also where the product is beyond the largest float; inspection says the same."""
    config = TINY_CONFIG | {"max_position_embeddings": 64, "rope_scaling": YARN | rope}
    write_checkpoint(tmp_path, config, make_tensors(TINY_CONFIG))
    with pytest.raises(CheckpointError, match=r"context.*expected: at most 2147483648 ") as info:
        ModelConfig.from_pretrained(tmp_path)
    assert inspect_model(tmp_path).problems == [str(info.value)]


def test_inspection_of_a_length_that_no_float_holds(tmp_path: Path) -> None:
    config = TINY_CONFIG | {"max_position_embeddings": 10**400, "rope_scaling": LINEAR}
    write_checkpoint(tmp_path, config, make_tensors(TINY_CONFIG))
    with pytest.raises(CheckpointError, match="bad max_position_embeddings") as info:
        ModelConfig.from_pretrained(tmp_path)
    assert inspect_model(tmp_path).problems == [str(info.value)]


@pytest.mark.parametrize("rope", [YARN, LINEAR])
def test_a_sequence_as_long_as_the_stretched_context(
    rope: dict[str, Any], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The named case: positions up to 255 where max_position_embeddings is 64."""
    config = TINY_CONFIG | {"max_position_embeddings": 64, "rope_scaling": rope}
    config.pop("rope_parameters", None)
    weights = make_tensors(config)
    write_checkpoint(tmp_path, config, weights)
    assert ModelConfig.from_pretrained(tmp_path).context_length == 256
    assert ModelConfig.from_pretrained(tmp_path, context_length=200).context_length == 200
    with pytest.raises(UnsupportedConfigError, match="257 is not between 1 and the model's 256"):
        ModelConfig.from_pretrained(tmp_path, context_length=257)
    tokens = torch.randint(0, 1007, (256,), generator=torch.Generator().manual_seed(2)).tolist()
    expected = reference_log_probs(config, {n: w.float() for n, w in weights.items()}, tokens)
    session = Session(tmp_path, "float32", max_total_tokens=300)
    assert (session.prefill(tokens[:255], 100) - expected[254]).abs().max() < 1e-3
    assert (session.decode(tokens[255]) - expected[255]).abs().max() < 1e-3
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["memory"]["context_length"] == 256


@pytest.mark.parametrize(
    "name",
    [
        "model.layers.0.self_attn.rotary_emb.inv_freq",
        "model.layers.0.self_attn.rotary_emb.cos_cached",
        "model.layers.0.self_attn.rotary_emb.sin_cached",
        "model.rotary_emb.inv_freq",
        "model.rotary_emb.original_inv_freq",
        "model.layers.1.self_attn.masked_bias",
        "model.layers.1.self_attn.bias",
        "model.layers.1.attn.masked_bias",
        "model.embed_tokens.position_ids",
        "rope.freqs",
    ],
)
@pytest.mark.parametrize("dtype", [torch.float32, torch.int64])
def test_buffers_that_follow_from_the_configuration(
    name: str, dtype: torch.dtype, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG, make_tensors(TINY_CONFIG))
    plain = Session(tmp_path, "float16").prefill([3, 1, 4])
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(3, dtype=dtype)}, file)
    assert torch.equal(Session(tmp_path, "float16").prefill([3, 1, 4]), plain)
    assert main(["inspect", str(tmp_path)]) == 0
    assert "follows from the configuration" in capsys.readouterr().out


@pytest.mark.parametrize(
    "name", ["model.layers.0.self_attn.q_proj.masked_bias", "model.layers.0.cos_cached", "freqs"]
)
def test_other_tensors_are_not(name: str, tmp_path: Path) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG, make_tensors(TINY_CONFIG))
    file = tmp_path / "model.safetensors"
    save_file({**load_file(file), name: torch.ones(3)}, file)
    with pytest.raises(CheckpointError, match=f"belongs to no parameter.*{name}"):
        Session(tmp_path, "float16")
