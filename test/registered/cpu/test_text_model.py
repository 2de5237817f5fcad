"""Configurations that do not run end with one error that names the key, before any weight is read:
there are no weights in these directories.
"""

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_models import ARCHITECTURES

register_cpu_ci(est_time=2, suite="per-commit")


def read(directory: Path, config: Mapping[str, Any]) -> ModelConfig:
    (directory / "config.json").write_text(json.dumps(config))
    return ModelConfig.from_pretrained(directory)


def other(architecture: str, name: str, **more: Any) -> dict[str, Any]:
    """The configuration of another architecture than those that run."""
    return {**ARCHITECTURES[architecture], "architectures": [name], **more}


MIXTURES: dict[str, tuple[Mapping[str, Any], str]] = {
    "Mixtral": (
        other("mistral", "MixtralForCausalLM", model_type="mixtral", num_local_experts=8),
        "MixtralForCausalLM with num_local_experts 8",
    ),
    "Qwen3-MoE": (
        other("qwen3", "Qwen3MoeForCausalLM", model_type="qwen3_moe", num_experts=128),
        "Qwen3MoeForCausalLM with num_experts 128",
    ),
    "gpt-oss": (
        other("qwen3", "GptOssForCausalLM", model_type="gpt_oss", num_local_experts=32),
        "GptOssForCausalLM with num_local_experts 32",
    ),
    "DeepSeek": (
        {**ARCHITECTURES["deepseek-v3"], "first_k_dense_replace": 1},
        "DeepseekV3ForCausalLM with n_routed_experts 4",
    ),
    "DeepSeek-V2 without the key": (
        {k: v for k, v in ARCHITECTURES["deepseek-v2"].items() if k != "first_k_dense_replace"},
        "DeepseekV2ForCausalLM with n_routed_experts 4",
    ),
}


@pytest.mark.parametrize(("config", "named"), MIXTURES.values(), ids=MIXTURES)
def test_mixtures_of_experts_are_refused(
    config: Mapping[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedConfigError, match=f"mixture-of-experts.*{named}"):
        read(tmp_path, config)


@pytest.mark.parametrize("architecture", ["deepseek-v2", "deepseek-v3"])
def test_dense_layers_of_a_mixture_run(architecture: str, tmp_path: Path) -> None:
    assert read(tmp_path, ARCHITECTURES[architecture]).num_hidden_layers == 2


OPTIONS: dict[str, tuple[str, dict[str, Any], str]] = {
    "activation": ("llama", {"hidden_act": "gelu"}, "hidden_act 'gelu'"),
    "soft cap": ("llama", {"final_logit_softcapping": 30.0}, "final_logit_softcapping 30.0"),
    "score cap": ("qwen3", {"attn_logit_softcapping": 50.0}, "attn_logit_softcapping 50.0"),
    "chunks": ("llama", {"attention_chunk_size": 8192}, "attention_chunk_size 8192"),
    "layer kind": (
        "ministral",
        {"layer_types": ["full_attention", "chunked_attention"]},
        "layer_types with 'chunked_attention'",
    ),
    "architecture": ("llama", {"architectures": ["GemmaForCausalLM"]}, "'GemmaForCausalLM'"),
    "text model": (
        "mistral3",
        {"text_config": {**ARCHITECTURES["mistral3"]["text_config"], "model_type": "mistral4"}},
        "text model 'mistral4' of Mistral3ForConditionalGeneration",
    ),
    "uneven heads": (
        "llama",
        {"num_key_value_heads": 4},
        "num_attention_heads 6 is not a multiple of num_key_value_heads 4",
    ),
}


@pytest.mark.parametrize(("architecture", "change", "named"), OPTIONS.values(), ids=OPTIONS)
def test_options_that_are_not_computed_are_refused(
    architecture: str, change: Mapping[str, Any], named: str, tmp_path: Path
) -> None:
    with pytest.raises(UnsupportedConfigError, match=named):
        read(tmp_path, {**ARCHITECTURES[architecture], **change})


def test_wrapper_without_a_text_model(tmp_path: Path) -> None:
    config = {k: v for k, v in ARCHITECTURES["mistral3"].items() if k != "text_config"}
    with pytest.raises(CheckpointError, match="lacks its text model"):
        read(tmp_path, config)


@pytest.mark.parametrize(
    ("outer", "inner", "tied"),
    [
        ({}, {}, False),
        ({}, {"tie_word_embeddings": True}, True),
        ({"tie_word_embeddings": True}, {}, True),
        ({"tie_word_embeddings": True}, {"tie_word_embeddings": False}, False),
    ],
)
def test_what_a_wrapper_says_about_tying(
    outer: dict[str, Any], inner: dict[str, Any], tied: bool, tmp_path: Path
) -> None:
    config = {k: v for k, v in ARCHITECTURES["mistral3"].items() if k != "tie_word_embeddings"}
    text = {k: v for k, v in config["text_config"].items() if k != "tie_word_embeddings"}
    result = read(tmp_path, {**config, **outer, "text_config": text | inner})
    assert result.tie_word_embeddings == tied
    assert result.architecture == "Ministral3ForCausalLM"
    assert result.unused_tensors.skipped_modules == ("vision_tower", "multi_modal_projector")
