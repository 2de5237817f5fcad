"""scripts/make_demo_model.py: the conversion from GGUF, and the models that it writes."""

from __future__ import annotations

import importlib.util
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from srt.checkpoint.formats.schemes import SCHEMES
from srt.configs.hf_transformers import load_hf_model, load_tokenizer
from srt.errors import SrtError
from srt.layers.quantization.fp8_quantization import quantize_weight
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=20, suite="per-commit")

pytest.importorskip("gguf", reason="needs the extra `demo`")

SCRIPT = Path(__file__).resolve().parents[3] / "scripts" / "make_demo_model.py"


@pytest.fixture(scope="module")
def script() -> Iterator[ModuleType]:
    spec = importlib.util.spec_from_file_location("make_demo_model", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    yield module
    sys.modules.pop("make_demo_model", None)


@pytest.mark.parametrize(("heads", "head_dim", "columns"), [(1, 2, 3), (3, 8, 5), (9, 64, 16)])
def test_undoes_the_rope_permutation(
    script: ModuleType, heads: int, head_dim: int, columns: int
) -> None:
    """GGUF row 2i of a head is Hugging Face row i, and row 2i + 1 is row i + head_dim / 2."""
    original = np.random.default_rng(1).normal(size=(heads * head_dim, columns))
    stored = np.empty_like(original)
    for head in range(heads):
        for i in range(head_dim // 2):
            first = head * head_dim
            stored[first + 2 * i] = original[first + i]
            stored[first + 2 * i + 1] = original[first + i + head_dim // 2]
    np.testing.assert_array_equal(script.undo_rope_permutation(stored, heads), original)


@pytest.mark.parametrize(
    ("gguf_name", "expected"),
    [
        ("token_embd.weight", "model.embed_tokens.weight"),
        ("output_norm.weight", "model.norm.weight"),
        ("blk.12.attn_q.weight", "model.layers.12.self_attn.q_proj.weight"),
        ("blk.0.ffn_down.weight", "model.layers.0.mlp.down_proj.weight"),
        ("blk.3.ffn_norm.weight", "model.layers.3.post_attention_layernorm.weight"),
    ],
)
def test_names(script: ModuleType, gguf_name: str, expected: str) -> None:
    assert script.hf_name(gguf_name) == expected


@pytest.mark.parametrize("name", ["blk.0.ffn_gate_exps.weight", "enc.0.attn_q.weight"])
def test_refuses_tensors_it_does_not_know(script: ModuleType, name: str) -> None:
    with pytest.raises(SrtError, match=name):
        script.hf_name(name)


def test_stamp_tells_a_complete_run(script: ModuleType, tmp_path: Path) -> None:
    assert not script.is_complete(tmp_path)
    for name in (script.BF16_NAME, script.FP8_NAME):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    script.write_json(tmp_path / ".stamp", script.stamp_content(tmp_path))
    assert script.is_complete(tmp_path)
    config = tmp_path / script.FP8_NAME / "config.json"
    config.write_text("{ }")
    assert not script.is_complete(tmp_path)
    config.write_text("{}")
    assert script.is_complete(tmp_path)
    config.unlink()
    assert not script.is_complete(tmp_path)


def test_a_stamp_of_another_revision_does_not_count(
    script: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / script.BF16_NAME).mkdir()
    (tmp_path / script.BF16_NAME / "config.json").write_text("{}")
    script.write_json(tmp_path / ".stamp", script.stamp_content(tmp_path))
    assert script.is_complete(tmp_path)
    monkeypatch.setattr(script, "REVISION", script.REVISION + 1)
    assert not script.is_complete(tmp_path)


def test_second_run_downloads_nothing(
    script: ModuleType, demo_models: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(script, "fetch_gguf", lambda *args: pytest.fail("downloads again"))
    monkeypatch.setattr(sys, "argv", ["make_demo_model.py", "--out", str(demo_models)])
    assert script.main() == 0


def test_fp8_model_is_the_quantized_bf16_model(script: ModuleType, demo_models: Path) -> None:
    config = json.loads((demo_models / script.FP8_NAME / "config.json").read_text())
    assert config["quantization_config"]["quant_method"] == "fp8"
    assert config["tie_word_embeddings"] is True
    with (
        MappedCheckpoint.open(demo_models / script.BF16_NAME) as bf16,
        MappedCheckpoint.open(demo_models / script.FP8_NAME) as fp8,
    ):
        assert {meta.dtype for meta in bf16} == {"BF16"}
        names = [name for name in fp8.names() if not name.endswith("_scale")]
        assert names == bf16.names()
        name = "model.layers.7.self_attn.k_proj.weight"
        expected = quantize_weight(bf16.get(name), SCHEMES["per-tensor"])
        assert torch.equal(fp8.get(name).float(), expected.weight.float())
        assert torch.equal(fp8.get(f"{name}_scale"), expected.scale)
        embedding = "model.embed_tokens.weight"
        assert torch.equal(fp8.get(embedding), bf16.get(embedding))


@pytest.fixture(scope="module")
def tokenizer(demo_models: Path, script: ModuleType) -> Any:
    return load_tokenizer(demo_models / script.FP8_NAME)


@pytest.mark.parametrize(
    "text",
    [
        "Hello, world! 12345 it's   fine\n\n\tdef f(x):\n    return x**2",
        "naïve café – “quotes” 日本語 🙂 ﷽",
        "<|im_start|>user\nhi<|im_end|>\n<|endoftext|>",
        " leading and trailing ",
    ],
)
def test_text_survives_the_tokenizer(tokenizer: Any, text: str) -> None:
    assert tokenizer.decode(tokenizer(text)["input_ids"]) == text


def test_special_tokens_and_digits(tokenizer: Any) -> None:
    special = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
    assert tokenizer.convert_tokens_to_ids(special) == [0, 1, 2]
    assert tokenizer("".join(special))["input_ids"] == [0, 1, 2]
    assert (tokenizer.bos_token_id, tokenizer.eos_token_id, tokenizer.pad_token_id) == (1, 2, 2)
    assert tokenizer.tokenize("x 2024") == ["x", "Ġ", "2", "0", "2", "4"]


def test_transformers_answers_with_paris(
    tokenizer: Any, demo_models: Path, script: ModuleType
) -> None:
    """The whole conversion, judged by another implementation of the architecture."""
    model = load_hf_model(demo_models / script.BF16_NAME, torch.float32)
    messages = [{"role": "user", "content": "What is the capital of France?"}]
    prompt = tokenizer.apply_chat_template(messages, add_generation_prompt=True, tokenize=False)
    inputs = tokenizer(prompt, return_tensors="pt")
    output = model.generate(**inputs, max_new_tokens=12, do_sample=False)
    answer = tokenizer.decode(output[0, inputs["input_ids"].shape[1] :])
    assert answer == "The capital of France is Paris.<|im_end|>"
