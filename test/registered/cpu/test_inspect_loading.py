"""`srt inspect` says that a checkpoint runs exactly when loading it goes through, and otherwise
what loading says. Only what the bytes of tensors tell is left to loading. test_format_troubles.py
does the same with damaged scales and weights of every format.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srt.cli.main import main
from srt.configs.hf_transformers import load_tokenizer
from srt.configs.model_config import ModelConfig
from srt.errors import SrtError
from srt.inspection.report import inspect_model
from srt.model_loader.loader import load_model
from srt.sampling.sampling_defaults import get_sampling_defaults
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import FORMATS, write_fp8_checkpoint
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_models import ARCHITECTURES
from srt.test.tiny_models import make_tensors as make_model_tensors

register_cpu_ci(est_time=20, suite="per-commit")

Tensors = dict[str, Tensor]


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return make_tensors(TINY_CONFIG)


def loading_error(directory: Path) -> str | None:
    """What `srt generate` would say, by its own steps."""
    try:
        config = ModelConfig.from_pretrained(directory)
        get_sampling_defaults(directory)
        load_tokenizer(directory)
        load_model(config, progress=False)
    except SrtError as error:
        return str(error)
    return None


def inspection_error(directory: Path) -> str | None:
    try:
        inspection = inspect_model(directory)
    except SrtError as error:
        return str(error)
    assert len(inspection.problems) <= 1
    return None if inspection.runs_here else inspection.problems[0]


def assert_same_verdict(directory: Path) -> str | None:
    found = inspection_error(directory)
    assert found == loading_error(directory)
    return found


@pytest.mark.parametrize("name", FORMATS)
def test_formats(name: str, tmp_path: Path, weights: Tensors) -> None:
    skip = ["model.layers.1.mlp.down_proj"]
    write_fp8_checkpoint(FORMATS[name], tmp_path, TINY_CONFIG, weights, skip=skip)
    assert assert_same_verdict(tmp_path) is None


@pytest.mark.parametrize("name", ARCHITECTURES)
def test_architectures(name: str, tmp_path: Path) -> None:
    config = ARCHITECTURES[name]
    write_checkpoint(tmp_path, dict(config), make_model_tensors(config))
    assert assert_same_verdict(tmp_path) is None


def unquantized_shard(tensors: Tensors) -> None:
    name = "model.layers.0.self_attn.q_proj.weight"
    del tensors[f"{name}_scale"]
    tensors[name] = tensors[name].to(torch.bfloat16)


def fp8_embedding(tensors: Tensors) -> None:
    name = "model.embed_tokens.weight"
    tensors[name] = tensors[name].to(torch.float8_e4m3fn)
    tensors[f"{name}_scale"] = torch.tensor(1.0)


def zero_point(tensors: Tensors) -> None:
    name = "model.layers.0.mlp.down_proj.weight"
    tensors[f"{name}_zero_point"] = torch.zeros((), dtype=torch.int8)


def surplus_bias(tensors: Tensors) -> None:
    tensors["model.layers.1.mlp.down_proj.bias"] = torch.zeros(96, dtype=torch.bfloat16)


def surplus_layer(tensors: Tensors) -> None:
    tensors["model.layers.7.mlp.down_proj.weight"] = torch.zeros(3, 3, dtype=torch.bfloat16)


def missing_norm(tensors: Tensors) -> None:
    del tensors["model.norm.weight"]


def missing_layer(tensors: Tensors) -> None:
    for name in [name for name in tensors if name.startswith("model.layers.1.")]:
        del tensors[name]


def missing_head(tensors: Tensors) -> None:
    tensors.pop("lm_head.weight", None)


def other_vocabulary(tensors: Tensors) -> None:
    tensors["model.embed_tokens.weight"] = tensors["model.embed_tokens.weight"][:-1].contiguous()


def integer_norm(tensors: Tensors) -> None:
    tensors["model.norm.weight"] = tensors["model.norm.weight"].to(torch.int32)


def merged_beside_parts(tensors: Tensors) -> None:
    parts = [tensors[f"model.layers.0.mlp.{n}_proj.weight"] for n in ("gate", "up")]
    tensors["model.layers.0.mlp.gate_up_proj.weight"] = torch.cat(
        [p.view(torch.uint8) for p in parts]
    ).view(torch.float8_e4m3fn)
    tensors["model.layers.0.mlp.gate_up_proj.weight_scale"] = torch.tensor(1.0)


def two_spellings(tensors: Tensors) -> None:
    tensors["language_model.model.norm.weight"] = tensors["model.norm.weight"].clone()


def rotary_buffers(tensors: Tensors) -> None:
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.ones(16)


MISFITS: dict[Callable[[Tensors], None], bool | None] = {
    # Change -> whether it runs; None where only the two have to agree.
    unquantized_shard: None,
    fp8_embedding: False,
    zero_point: False,
    surplus_bias: False,
    surplus_layer: False,
    missing_norm: False,
    missing_layer: False,
    missing_head: None,
    other_vocabulary: False,
    integer_norm: False,
    merged_beside_parts: False,
    two_spellings: False,
    rotary_buffers: None,
}


@pytest.mark.parametrize("change", MISFITS, ids=lambda change: change.__name__)
def test_tensors_that_fit_no_parameter(
    change: Callable[[Tensors], None], tmp_path: Path, weights: Tensors
) -> None:
    tensors = quantize(weights)
    change(tensors)
    write_checkpoint(tmp_path, TINY_CONFIG, tensors, {"quant_method": "fp8"})
    error = assert_same_verdict(tmp_path)
    if MISFITS[change] is not None:
        assert (error is None) == MISFITS[change]


@pytest.mark.parametrize(
    "changes",
    [
        {"num_hidden_layers": 3},
        {"num_hidden_layers": 1},
        {"hidden_size": 64},
        {"num_key_value_heads": 3},
        {"num_attention_heads": 0},
        {"num_attention_heads": None},
        {"vocab_size": 5},
        {"intermediate_size": 201},
        {"attention_bias": True},
        {"tie_word_embeddings": True},
        {"tie_word_embeddings": False},
        {"rope_scaling": {"rope_type": "none such"}},
        {"hidden_act": "gelu"},
        {"model_type": "none such"},
        {"max_position_embeddings": "many"},
    ],
    ids=str,
)
def test_configurations(changes: dict[str, Any], tmp_path: Path, weights: Tensors) -> None:
    config = {**TINY_CONFIG, **changes}
    write_checkpoint(tmp_path, config, quantize(weights), {"quant_method": "fp8"})
    assert_same_verdict(tmp_path)


@pytest.mark.parametrize(
    "name", ["generation_config.json", "tokenizer.json", "chat_template.jinja"]
)
@pytest.mark.parametrize("content", ["{", "[]", '{"temperature": -1}'])
def test_files_beside_the_weights(
    name: str, content: str, tmp_path: Path, weights: Tensors
) -> None:
    write_checkpoint(tmp_path, TINY_CONFIG, quantize(weights), {"quant_method": "fp8"})
    (tmp_path / name).write_text(content)
    assert_same_verdict(tmp_path)


def test_status_tells_a_script(
    tmp_path: Path, weights: Tensors, capsys: pytest.CaptureFixture[str]
) -> None:
    """0: it runs; 1: it does not, for the reasons printed; 2: it cannot be read."""
    tensors = quantize(weights)
    write_checkpoint(tmp_path, TINY_CONFIG, tensors, {"quant_method": "fp8"})
    assert main(["inspect", str(tmp_path)]) == 0
    assert "Runs here: yes" in capsys.readouterr().out
    surplus_bias(tensors)
    write_checkpoint(tmp_path, TINY_CONFIG, tensors, {"quant_method": "fp8"})
    assert main(["inspect", str(tmp_path)]) == 1
    printed = capsys.readouterr().out
    assert "Runs here: no" in printed
    assert "down_proj.bias" in re.sub(r"\s", "", printed)
    assert main(["inspect", str(tmp_path), "--json"]) == 1
    report = json.loads(capsys.readouterr().out)
    assert report["runs_here"] is False
    assert "down_proj.bias" in report["problems"][0]
    (tmp_path / "config.json").write_text("{")
    assert main(["inspect", str(tmp_path)]) == 2
    assert capsys.readouterr().err.count("\n") == 1
