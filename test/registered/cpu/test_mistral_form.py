"""Mistral's own form: what params.json says in transformers' words, and what is refused."""

import base64
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.checkpoint.config_files import read_config
from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError, SrtError, UnsupportedConfigError
from srt.managers.tokenizer import encode, load_tokenizer
from srt.model_loader.loader import load_model
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import FORMATS, write_fp8_checkpoint
from srt.test.mistral_form import to_params
from srt.test.tiny_llama import TINY_CONFIG, make_tensors

register_cpu_ci(est_time=6, suite="per-commit")

YARN = {
    "rope_type": "yarn",
    "rope_theta": 1e6,
    "factor": 4.0,
    "original_max_position_embeddings": 64,
    "beta_fast": 32.0,
    "beta_slow": 1.0,
}


def write(directory: Path, **changes: Any) -> Path:
    """params.json of the tiny model with changes; None removes a key."""
    params = to_params(TINY_CONFIG) | changes
    content = {key: value for key, value in params.items() if value is not None}
    (directory / "params.json").write_text(json.dumps(content))
    return directory


def test_sizes(tmp_path: Path) -> None:
    config = read_config(write(tmp_path, sliding_window=48))
    for key in (
        "hidden_size",
        "intermediate_size",
        "num_hidden_layers",
        "num_attention_heads",
        "num_key_value_heads",
        "head_dim",
        "vocab_size",
        "rms_norm_eps",
        "max_position_embeddings",
        "tie_word_embeddings",
    ):
        assert config[key] == TINY_CONFIG[key], key
    assert config["sliding_window"] == 48
    assert config["rope_parameters"] == {"rope_type": "default", "rope_theta": 10000.0}
    assert config["architectures"] == ["MistralForCausalLM"]
    assert ModelConfig.from_pretrained(tmp_path).eos_token_ids == {2}


@pytest.mark.parametrize("beta", [None, 0.1])
def test_yarn_and_the_scaling_of_queries(tmp_path: Path, beta: float | None) -> None:
    rope = YARN if beta is None else YARN | {"llama_4_scaling_beta": beta}
    config = read_config(write(tmp_path, **to_params(TINY_CONFIG | {"rope_parameters": rope})))
    assert config["architectures"][0] == (
        "MistralForCausalLM" if beta is None else "Ministral3ForCausalLM"
    )
    found = config["rope_parameters"]
    assert found | rope == found
    # YaRN's factor on attention is their quotient: none, as `apply_scale: false` says.
    assert found["mscale"] == found["mscale_all_dim"] == 1.0
    assert ModelConfig.from_pretrained(tmp_path).hf_config.rope_parameters["factor"] == 4.0


@pytest.mark.parametrize(
    ("quantization", "scheme"),
    [
        ({"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"}, "static"),
        ({"qformat_weight": "fp8_e4m3", "qscheme_act": "NO_SCALES"}, "dynamic"),
    ],
)
def test_quantization(tmp_path: Path, quantization: dict[str, Any], scheme: str) -> None:
    config = read_config(write(tmp_path, quantization=quantization))
    assert config["quantization_config"] == {"quant_method": "fp8", "activation_scheme": scheme}


@pytest.mark.parametrize("key", ["vision_encoder", "multimodal"])
def test_a_vision_tower_is_left_out(tmp_path: Path, key: str) -> None:
    write_fp8_checkpoint(FORMATS["mistral-own"], tmp_path, TINY_CONFIG, make_tensors(TINY_CONFIG))
    params = json.loads((tmp_path / "params.json").read_text())
    tower = {"hidden_size": 32}
    params[key] = {"vision_encoder_args": tower} if key == "multimodal" else tower
    (tmp_path / "params.json").write_text(json.dumps(params))
    file = tmp_path / "consolidated.safetensors"
    vision = {
        f"{name}.weight": torch.zeros(3, 3)
        for name in ("vision_encoder.ln_pre", "vision_language_adapter.w_in", "patch_merger.merge")
    }
    save_file(load_file(file) | vision, file)
    assert read_config(tmp_path)["architectures"] == ["Mistral3ForConditionalGeneration"]
    model = load_model(ModelConfig.from_pretrained(tmp_path), progress=False)
    assert sum("layers" in name for name, _ in model.named_parameters()) > 0


def test_an_index_names_the_shards(tmp_path: Path) -> None:
    write_fp8_checkpoint(FORMATS["mistral-own"], tmp_path, TINY_CONFIG, make_tensors(TINY_CONFIG))
    tensors = load_file(tmp_path / "consolidated.safetensors")
    (tmp_path / "consolidated.safetensors").unlink()
    names = sorted(tensors)
    weight_map: dict[str, str] = {}
    for i, part in enumerate((names[::2], names[1::2]), start=1):
        file = f"consolidated-0000{i}-of-00002.safetensors"
        save_file({name: tensors[name] for name in part}, tmp_path / file)
        weight_map |= dict.fromkeys(part, file)
    index = tmp_path / "consolidated.safetensors.index.json"
    index.write_text(json.dumps({"weight_map": weight_map}))
    load_model(ModelConfig.from_pretrained(tmp_path), progress=False)
    (tmp_path / "consolidated-00002-of-00002.safetensors").unlink()
    with pytest.raises(CheckpointError, match=r"consolidated.*index.json is absent.*00002-of"):
        load_model(ModelConfig.from_pretrained(tmp_path), progress=False)


# Name -> (changes of params.json, error's class, message).
REFUSED: dict[str, tuple[dict[str, Any], type[SrtError], str]] = {
    "no size": ({"n_heads": None}, CheckpointError, "params.json lacks n_heads"),
    "bad size": ({"dim": "many"}, CheckpointError, "bad dim.*found: many"),
    "yarn without factor": ({"yarn": {"alpha": 1}}, CheckpointError, "lacks factor"),
    "experts": ({"moe": {"num_experts": 8}}, UnsupportedConfigError, "mixture of experts.*8"),
    "latents": ({"kv_lora_rank": 512}, UnsupportedConfigError, "kv_lora_rank 512"),
    "audio": ({"multimodal": {"whisper_model_args": {}}}, UnsupportedConfigError, "whisper"),
    "other weights": (
        {"quantization": {"qformat_weight": "nvfp4"}},
        UnsupportedConfigError,
        "qformat_weight 'nvfp4'.*expected.*'fp8_e4m3'",
    ),
    "other activations": (
        {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "GROUP"}},
        UnsupportedConfigError,
        "qscheme_act 'GROUP'.*tensor",
    ),
}


@pytest.mark.parametrize("case", REFUSED)
def test_what_is_refused(tmp_path: Path, case: str) -> None:
    changes, kind, message = REFUSED[case]
    with pytest.raises(kind, match=message):
        ModelConfig.from_pretrained(write(tmp_path, **changes))


def test_a_grid_cannot_be_reordered(tmp_path: Path) -> None:
    write_fp8_checkpoint(FORMATS["mistral-own"], tmp_path, TINY_CONFIG, make_tensors(TINY_CONFIG))
    params = json.loads((tmp_path / "params.json").read_text())
    params["quantization"] = {"quant_method": "fp8", "weight_block_size": [32, 32]}
    (tmp_path / "params.json").write_text(json.dumps(params))
    file = tmp_path / "consolidated.safetensors"
    save_file(load_file(file) | {"layers.0.attention.wq.qscale_weight": torch.ones(3, 3)}, file)
    with pytest.raises(CheckpointError, match=r"order.*wq.qscale_weight; expected: 96 rows"):
        load_model(ModelConfig.from_pretrained(tmp_path), progress=False)


def write_tekken(directory: Path) -> None:
    """All bytes, a few longer tokens, and ten places for special ones before them."""
    words = [*(bytes([i]) for i in range(256)), b"he", b"ll", b"hell", b"hello"]
    tekken = {
        "config": {
            "pattern": r"[^\s]+|\s+",
            "default_vocab_size": 270,
            "default_num_special_tokens": 10,
            "version": "v7",
        },
        "vocab": [
            {"rank": i, "token_bytes": base64.b64encode(word).decode(), "token_str": None}
            for i, word in enumerate(words)
        ],
        "special_tokens": [
            {"rank": i, "token_str": token, "is_control": True}
            for i, token in enumerate(("<unk>", "<s>", "</s>"))
        ],
    }
    (directory / "tekken.json").write_text(json.dumps(tekken))


def test_tekken(tmp_path: Path) -> None:
    write_tekken(tmp_path)
    tokenizer = load_tokenizer(tmp_path)
    assert tokenizer is not None
    ids = encode(tokenizer, "hello \u00e9")
    assert ids == [1, 10 + 259, 10 + 0x20, 10 + 0xC3, 10 + 0xA9]
    assert tokenizer.decode(ids, skip_special_tokens=True) == "hello \u00e9"


def test_token_ids_without_a_tokenizer_that_can_be_read(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "tekken.json").write_text("{}")
    assert load_tokenizer(tmp_path) is None
    assert "only token ids can be given" in caplog.text
    assert "tekken.json" in caplog.text
