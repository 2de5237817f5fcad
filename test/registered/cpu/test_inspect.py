"""`srt inspect`: what it finds in a checkpoint, and when it says that the model does not run."""

from __future__ import annotations

import json
import math
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from srt.cli.main import main
from srt.inspection.findings import Inspection
from srt.inspection.report import inspect_model
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import FORMATS, write_fp8_checkpoint
from srt.test.tiny_llama import TINY_CONFIG, make_tensors
from srt.utils import host_memory

register_cpu_ci(est_time=8, suite="per-commit")

LAYERS, HEADS, KV_HEADS, HEAD_DIM, VOCAB = 12, 3, 1, 32, 50
HIDDEN, INNER = HEADS * HEAD_DIM, 160
CONFIG: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": HIDDEN,
    "intermediate_size": INNER,
    "max_position_embeddings": 1000,
    "num_attention_heads": HEADS,
    "num_hidden_layers": LAYERS,
    "num_key_value_heads": KV_HEADS,
    "tie_word_embeddings": False,
    "vocab_size": VOCAB,
}
# Of each layer, what is not FP8.
PLAIN: dict[str, tuple[int, ...]] = {
    "input_layernorm": (HIDDEN,),
    "post_attention_layernorm": (HIDDEN,),
    "self_attn.q_proj": (HIDDEN, HIDDEN),
    "self_attn.k_proj": (HEAD_DIM, HIDDEN),
    "self_attn.v_proj": (HEAD_DIM, HIDDEN),
    "self_attn.o_proj": (HIDDEN, HIDDEN),
    "mlp.gate_proj": (INNER, HIDDEN),
    "mlp.up_proj": (INNER, HIDDEN),
}
PLAIN_ELEMENTS = LAYERS * sum(math.prod(shape) for shape in PLAIN.values()) + HIDDEN
FP8 = {"quant_method": "fp8", "activation_scheme": "static"}
SCALES: dict[str, tuple[int, ...]] = {
    "fp8 per-tensor": (),
    "fp8 per-channel": (HIDDEN, 1),
    "fp8 per-block": (1, 2),
}


def bf16(*shape: int) -> torch.Tensor:
    return torch.ones(shape, dtype=torch.bfloat16)


def fp8_tensors(scale: torch.Tensor | None) -> dict[str, torch.Tensor]:
    """All of a small Llama; of each layer one projection is FP8."""
    tensors = {
        "model.embed_tokens.weight": bf16(VOCAB, HIDDEN),
        "model.norm.weight": bf16(HIDDEN),
        "lm_head.weight": bf16(VOCAB, HIDDEN),
    }
    for layer in range(LAYERS):
        prefix = f"model.layers.{layer}"
        for name, shape in PLAIN.items():
            tensors[f"{prefix}.{name}.weight"] = bf16(*shape)
        tensors[f"{prefix}.mlp.down_proj.weight"] = bf16(HIDDEN, INNER).to(torch.float8_e4m3fn)
        if scale is not None:
            tensors[f"{prefix}.mlp.down_proj.weight_scale"] = scale.clone()
    return tensors


def write(directory: Path, tensors: dict[str, torch.Tensor] | None, **config: object) -> Path:
    (directory / "config.json").write_text(json.dumps({**CONFIG, **config}))
    if tensors:
        save_file(tensors, directory / "model.safetensors")
    return directory


def groups(inspection: Inspection) -> dict[str, Any]:
    return {group.name: group for group in inspection.modules}


@pytest.mark.parametrize("scheme", SCALES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_tells_scheme_and_scales(tmp_path: Path, scheme: str, dtype: torch.dtype) -> None:
    tensors = fp8_tensors(torch.ones(SCALES[scheme], dtype=dtype))
    config = FP8 | {"weight_block_size": [128, 128] if "block" in scheme else None}
    inspection = inspect_model(write(tmp_path, tensors, quantization_config=config))
    assert inspection.scheme == scheme
    group = groups(inspection)["model.layers.*.mlp.down_proj"]
    assert (group.count, group.scheme) == (LAYERS, scheme)
    assert (group.dtype, group.shape) == ("F8_E4M3", (HIDDEN, INNER))
    assert group.scale_shape == SCALES[scheme]
    assert group.scale_dtype == {torch.float32: "F32", torch.bfloat16: "BF16"}[dtype]
    norm = groups(inspection)["model.layers.*.input_layernorm"]
    assert (norm.count, norm.scheme, norm.scale_shape) == (LAYERS, "unquantized", None)


def test_counts_parameters_and_bytes(tmp_path: Path) -> None:
    inspection = inspect_model(
        write(tmp_path, fp8_tensors(torch.tensor(1.0)), quantization_config=FP8)
    )
    fp8 = LAYERS * INNER * HIDDEN
    plain = 2 * VOCAB * HIDDEN + PLAIN_ELEMENTS
    assert inspection.parameters == fp8 + plain
    assert {d.dtype: (d.tensors, d.elements, d.nbytes) for d in inspection.dtypes} == {
        "F8_E4M3": (LAYERS, fp8, fp8),
        "BF16": (3 + LAYERS * len(PLAIN), plain, 2 * plain),
        "F32": (LAYERS, LAYERS, 4 * LAYERS),
    }
    memory = inspection.memory
    assert memory.weights == fp8 + 2 * plain + 4 * LAYERS
    assert memory.kv_per_token == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    assert memory.kv_context == 1000 * memory.kv_per_token
    size = (tmp_path / "model.safetensors").stat().st_size
    assert inspection.files == {"model.safetensors": size}
    assert inspection.runs_here


def test_wide_floats_are_held_in_16_bits(tmp_path: Path) -> None:
    tensors = {"lm_head.weight": torch.ones(VOCAB, HIDDEN), "model.norm.weight": bf16(HIDDEN)}
    inspection = inspect_model(write(tmp_path, tensors))
    assert inspection.memory.weights == 2 * (VOCAB * HIDDEN + HIDDEN)
    assert inspection.scheme == "unquantized"


def test_lists_what_is_not_used(tmp_path: Path) -> None:
    tensors = fp8_tensors(torch.tensor(1.0))
    for layer in range(LAYERS):
        tensors[f"model.layers.{layer}.mlp.down_proj.activation_scale"] = torch.tensor(1.0)
    write(tmp_path, tensors, quantization_config=FP8, tie_word_embeddings=True)
    inspection = inspect_model(tmp_path)
    ignored = {group.name: group for group in inspection.ignored}
    scales = ignored["model.layers.*.mlp.down_proj.activation_scale"]
    assert (scales.count, scales.nbytes) == (LAYERS, 4 * LAYERS)
    assert "16 bits" in scales.reason
    assert ignored["lm_head.weight"].nbytes == 2 * VOCAB * HIDDEN
    assert "tied" in ignored["lm_head.weight"].reason
    assert "lm_head" not in groups(inspection)
    assert inspection.parameters == LAYERS * INNER * HIDDEN + PLAIN_ELEMENTS + VOCAB * HIDDEN


def test_says_what_scales_are_for(tmp_path: Path) -> None:
    """Those of an FP8 KV cache are used when there is one, wherever a checkpoint has them."""
    tensors = fp8_tensors(torch.tensor(1.0))
    cache = ("self_attn.k_scale", "self_attn.v_proj.output_scale", "self_attn.k_proj.k_scale")
    others = ("self_attn.q_proj.output_scale", "mlp.down_proj.input_scale", "self_attn.q_scale")
    for i, name in enumerate((*cache[:2], *others)):
        tensors[f"model.layers.{i}.{name}"] = torch.tensor(1.0)
    tensors[f"model.layers.7.{cache[2]}"] = torch.tensor(1.0)
    inspection = inspect_model(write(tmp_path, tensors, quantization_config=FP8))
    reasons = {group.name.partition(".*.")[2]: group.reason for group in inspection.ignored}
    assert {name for name, why in reasons.items() if "--kv-cache-dtype fp8_e4m3" in why} == {*cache}
    assert {name for name, why in reasons.items() if "activations" in why} == {*others}
    assert inspection.kv_scale_layers == len(cache)


def problems(directory: Path) -> str:
    inspection = inspect_model(directory)
    assert inspection.runs_here == (not inspection.problems)
    return "\n".join(inspection.problems)


@pytest.mark.parametrize(
    ("config", "part"),
    [
        ({"architectures": ["BertModel"]}, "BertModel"),
        ({"quantization_config": {"quant_method": "mxfp4"}}, "mxfp4"),
        ({"quantization_config": {**FP8, "weight_block_size": 128}}, "128"),
        ({"quantization_config": {**FP8, "fmt": "e5m2"}}, "e5m2"),
    ],
)
def test_says_why_a_configuration_does_not_run(
    tmp_path: Path, config: dict[str, Any], part: str
) -> None:
    assert part in problems(write(tmp_path, fp8_tensors(torch.tensor(1.0)), **config))


def test_names_a_weight_without_scale(tmp_path: Path) -> None:
    write(tmp_path, fp8_tensors(None), quantization_config=FP8)
    assert "model.layers.0.mlp.down_proj.weight" in problems(tmp_path)
    assert inspect_model(tmp_path).scheme == "fp8 without scale"


def test_names_a_scale_that_does_not_fit(tmp_path: Path) -> None:
    write(tmp_path, fp8_tensors(torch.ones(3, 1)), quantization_config=FP8)
    message = (
        r"mlp.down_proj.weight_scale; expected: one element, \[96\], \[96, 1\]; found: \[3, 1\]"
    )
    assert re.search(message, problems(tmp_path))
    assert inspect_model(tmp_path).scheme == "fp8 with a scale of shape [3, 1]"


def test_misses_layers(tmp_path: Path) -> None:
    tensors = fp8_tensors(torch.tensor(1.0))
    kept = {k: v for k, v in tensors.items() if ".layers.3." not in k and ".layers.11." not in k}
    write(tmp_path, kept, quantization_config=FP8)
    assert re.search(r"layer.*3", problems(tmp_path))


@pytest.mark.parametrize("name", FORMATS)
def test_every_format(name: str, tmp_path: Path) -> None:
    fmt = FORMATS[name]
    write_fp8_checkpoint(fmt, tmp_path, TINY_CONFIG, make_tensors(TINY_CONFIG))
    inspection = inspect_model(tmp_path)
    assert inspection.runs_here, inspection.problems
    own_name = "layers.*.feed_forward.w3" if fmt.mistral_form else "model.layers.*.mlp.up_proj"
    kind = (
        "per-channel"
        if fmt.block[0] == 1
        else "per-tensor"
        if fmt.block[0] is None
        else "per-block"
    )
    assert groups(inspection)[own_name].scheme == f"fp8 {kind}"
    layers = TINY_CONFIG["num_hidden_layers"] if fmt.cache_scales else 0
    assert inspection.kv_scale_layers == layers
    used = {use for use in (fmt.input_scale, *fmt.cache_scales) if use}
    assert {group.name.rpartition(".")[2] for group in inspection.ignored} == used


def test_misses_an_untied_head(tmp_path: Path) -> None:
    tensors = fp8_tensors(torch.tensor(1.0))
    del tensors["lm_head.weight"]
    assert "lm_head.weight" in problems(write(tmp_path, tensors, quantization_config=FP8))


def test_weights_that_do_not_fit(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = host_memory.HostMemory(total=1000, available=1000, limit=None)
    monkeypatch.setattr("srt.inspection.memory_use.read_host_memory", lambda: small)
    tensors = fp8_tensors(torch.tensor(1.0))
    assert "1,000 are available" in problems(write(tmp_path, tensors, quantization_config=FP8))


def test_configuration_without_weights(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, None, quantization_config={**FP8, "weight_block_size": None})
    inspection = inspect_model(tmp_path)
    assert not inspection.has_weights
    assert inspection.scheme == "fp8"
    assert (inspection.parameters, inspection.memory.weights) == (None, None)
    assert inspection.memory.kv_per_token == 2 * LAYERS * KV_HEADS * HEAD_DIM * 2
    assert problems(tmp_path) == "there are no safetensors weights in the directory"
    assert main(["inspect", str(tmp_path)]) == 1
    assert "no weights: configuration only" in capsys.readouterr().out


def test_configuration_with_an_index_only(tmp_path: Path) -> None:
    """What a download of the small files leaves."""
    write(tmp_path, None, quantization_config={**FP8, "ignored_layers": ["lm_head"]})
    index = {"weight_map": {"a": "model-1.safetensors", "b": "model-2.safetensors"}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))
    assert "none of the 2 weight files" in problems(tmp_path)
    inspection = inspect_model(tmp_path)
    assert not inspection.has_weights
    assert inspection.listed_unquantized == ["lm_head"]


def test_prints_tables(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, fp8_tensors(torch.tensor(1.0)), quantization_config=FP8)
    assert main(["inspect", str(tmp_path)]) == 0
    printed = capsys.readouterr().out
    for part in ("fp8 per-tensor", "F8_E4M3 96x160", "F32 scalar", "Runs here: yes"):
        assert part in printed


def test_prints_json(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write(tmp_path, fp8_tensors(torch.tensor(1.0)), quantization_config=FP8)
    assert main(["inspect", str(tmp_path), "--json"]) == 0
    report = json.loads(capsys.readouterr().out)
    assert report["architecture"] == "LlamaForCausalLM"
    assert report["runs_here"] is True
    assert report["unquantized_modules"] == [
        "lm_head",
        "model.embed_tokens",
        *(f"model.layers.*.{name}" for name in sorted(PLAIN)),
        "model.norm",
    ]


@pytest.mark.parametrize(
    "changes",
    [
        {"max_position_embeddings": 10**400},
        {"max_position_embeddings": 10**4000, "head_dim": 10**2000},
        {"num_key_value_heads": 10**400},
    ],
    ids=["length", "product", "heads"],
)
def test_numbers_that_nobody_can_print(
    tmp_path: Path, changes: dict[str, Any], capsys: pytest.CaptureFixture[str]
) -> None:
    write(tmp_path, fp8_tensors(torch.tensor(1.0)), quantization_config=FP8, **changes)
    for options in ([], ["--json"]):
        assert main(["inspect", str(tmp_path), *options]) == 1
        assert "config.json has a bad" in " ".join(capsys.readouterr().out.split())


def test_bad_input_ends_with_status_2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def expect(part: str) -> None:
        assert main(["inspect", str(tmp_path)]) == 2
        printed = capsys.readouterr()
        assert printed.out == ""
        assert part in printed.err
        assert "Traceback" not in printed.err

    expect("config.json")
    (tmp_path / "config.json").write_text("{")
    expect("cannot read JSON")
    (tmp_path / "config.json").write_text("{}")
    expect("architecture")
    write(tmp_path, {"a": bf16(100)})
    file = tmp_path / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-7])
    expect("truncated")


def test_torch_is_imported_only_to_match_tensors(tmp_path: Path) -> None:
    """What the configuration rules out is told without: Torch would be most of the time."""
    config = {**FP8, "fmt": "int4"}
    write(tmp_path, fp8_tensors(torch.tensor(1.0)), quantization_config=config)
    code = """
import sys
from srt.cli.main import main
status = main(["inspect", sys.argv[1]])
print(status, "torch" in sys.modules, "transformers" in sys.modules)
"""
    command = [sys.executable, "-c", code, str(tmp_path)]
    printed = subprocess.run(command, check=True, capture_output=True, text=True).stdout
    assert printed.splitlines()[-1] == "1 False False"
