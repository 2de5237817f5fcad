"""What users meet with checkpoints that are damaged or contradict themselves: in every kind of
format, loading ends before anything runs, with an error that names file, tensor, what was expected
and what was found, and the command line with status 2 and that one line.
"""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from srt.checkpoint.weight_names import canonical_name
from srt.cli.main import main
from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.inspection.report import inspect_model
from srt.model_loader.loader import load_model
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import FORMATS, write_fp8_checkpoint
from srt.test.tiny_llama import TINY_CONFIG, make_tensors

register_cpu_ci(est_time=12, suite="per-commit")

Tensors = dict[str, Tensor]

KINDS = (
    "mistral-hf",
    "mistral-own",
    "deepseek",
    "compressed-tensors-dynamic",
    "modelopt-block",
    "fbgemm",
)
# A shard of a merged layer, [200, 96].
UP = "layers.1.mlp.up_proj"


def set_last(value: float) -> Callable[[Tensor], Tensor]:
    """Sets the last element."""

    def change(scale: Tensor) -> Tensor:
        scale = scale.clone()
        scale.view(-1)[-1] = value
        return scale

    return change


def with_nan(weight: Tensor) -> Tensor:
    codes = weight.view(torch.uint8).clone()
    codes[17, 5] = codes[18, 0] = 0xFF
    return codes.view(torch.float8_e4m3fn)


# Name -> (change of the weight, change of its scale, what the message says, tensor it names). A
# change that is None removes the tensor.
Change = Callable[[Tensor], Tensor] | None
KEEP: Change = lambda tensor: tensor  # noqa: E731
TROUBLES: dict[str, tuple[Change, Change, str, str]] = {
    "no scale": (KEEP, None, "an FP8 weight has no scale", "weight"),
    "no weight": (None, KEEP, "a scale has no weight", "scale"),
    "neither": (None, None, r"no tensor.*expected: \[200, 96\]; found: no such tensor", "weight"),
    "scale of a bf16 weight": (
        lambda weight: weight.to(torch.bfloat16),
        KEEP,
        "not FP8.*expected: a float8_e4m3fn weight; found: .*bfloat16",
        "scale",
    ),
    "E5M2 weight": (
        lambda weight: weight.float().to(torch.float8_e5m2),
        KEEP,
        "not FP8.*float8_e5m2",
        "scale",
    ),
    "NaN scale": (KEEP, set_last(float("nan")), "positive finite.*found: nan at index", "scale"),
    "infinite scale": (KEEP, set_last(float("inf")), "positive finite.*found: inf", "scale"),
    "zero scale": (KEEP, set_last(0.0), r"positive finite.*found: 0\.0 at index", "scale"),
    "negative scale": (KEEP, set_last(-0.5), r"positive finite.*found: -0\.5", "scale"),
    "NaN in the weight": (with_nan, KEEP, "holds NaN.*found: NaN in row 17", "weight"),
    "scale of another shape": (
        KEEP,
        lambda scale: torch.ones(7, dtype=scale.dtype),
        r"wrong shape.*expected: one element, .*found: \[7\]",
        "scale",
    ),
    "scale of integers": (
        KEEP,
        lambda scale: torch.ones(scale.shape, dtype=torch.int32),
        "wrong dtype.*expected: bfloat16 or float16 or float32 or .*; found: int32",
        "scale",
    ),
    "weight of another shape": (
        lambda weight: weight[:, :95].contiguous(),
        KEEP,
        r"wrong shape.*expected: \[200, 96\]; found: \[200, 95\]",
        "weight",
    ),
}


# What only values tell, and `srt inspect` therefore does not.
IN_VALUES = {"NaN scale", "infinite scale", "zero scale", "negative scale", "NaN in the weight"}


@pytest.fixture(scope="module")
def weights() -> Tensors:
    return make_tensors(TINY_CONFIG)


def rewrite(directory: Path, change: Callable[[Tensors], None]) -> Path:
    """Changes the tensors of the one weight file; returns it."""
    (file,) = directory.glob("*.safetensors")
    tensors = load_file(file)
    change(tensors)
    save_file(tensors, file)
    return file


@pytest.mark.parametrize("trouble", TROUBLES)
@pytest.mark.parametrize("kind", KINDS)
def test_trouble(
    kind: str,
    trouble: str,
    tmp_path: Path,
    weights: Tensors,
    capsys: pytest.CaptureFixture[str],
) -> None:
    change_weight, change_scale, message, named = TROUBLES[trouble]
    fmt = FORMATS[kind]
    write_fp8_checkpoint(fmt, tmp_path, TINY_CONFIG, weights)
    names = {"weight": f"{UP}.weight", "scale": f"{UP}.{fmt.scale_name}"}

    def damage(tensors: Tensors) -> None:
        for part, change in (("weight", change_weight), ("scale", change_scale)):
            (name,) = (n for n in tensors if canonical_name(n) == names[part])
            tensor = tensors.pop(name)
            if change is not None:
                tensors[name] = change(tensor)

    file = rewrite(tmp_path, damage)
    with pytest.raises(CheckpointError, match=message) as info:
        load_model(ModelConfig.from_pretrained(tmp_path), progress=False)
    error = info.value
    assert error.tensor is not None
    assert canonical_name(error.tensor) == names[named]
    assert error.file in (file, tmp_path)
    assert error.expected is not None
    assert error.found is not None
    assert_cli_error(tmp_path, str(error), capsys)
    assert inspect_model(tmp_path).problems == ([] if trouble in IN_VALUES else [str(error)])


def assert_cli_error(path: Path, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The command line ends with status 2 and one line on stderr; with --debug it raises."""
    capsys.readouterr()
    command = ["generate", "--model", str(path), "--raw", "--prompt", "x", "--quiet"]
    assert main(command) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err == f"srt: error: {message}\n"
    with pytest.raises((CheckpointError, UnsupportedConfigError)):
        main([*command, "--debug"])


@pytest.mark.parametrize("kind", KINDS)
def test_a_shard_without_its_sisters(kind: str, tmp_path: Path, weights: Tensors) -> None:
    """A merged layer of which one shard is absent."""
    write_fp8_checkpoint(FORMATS[kind], tmp_path, TINY_CONFIG, weights)

    def lose(tensors: Tensors) -> None:
        for name in [n for n in tensors if "layers.0.self_attn.k_proj" in canonical_name(n)]:
            del tensors[name]

    rewrite(tmp_path, lose)
    with pytest.raises(CheckpointError, match=r"no tensor.*layers.0.self_attn.k_proj.weight"):
        load_model(ModelConfig.from_pretrained(tmp_path), progress=False)


def test_fp8_that_no_configuration_announces(tmp_path: Path, weights: Tensors) -> None:
    write_fp8_checkpoint(FORMATS["modelopt"], tmp_path, TINY_CONFIG, weights)
    (tmp_path / "hf_quant_config.json").unlink()
    with pytest.raises(
        CheckpointError, match=r"nothing of quantization.*layers.0.*expected: a qua"
    ):
        load_model(ModelConfig.from_pretrained(tmp_path), progress=False)


@pytest.mark.parametrize("kind", KINDS)
def test_tied_embeddings(kind: str, tmp_path: Path, weights: Tensors) -> None:
    """A head beside tied embeddings is ignored, whatever it holds; untied ones need it."""
    tied = TINY_CONFIG | {"tie_word_embeddings": True}
    head = {"lm_head.weight": torch.full((1007, 96), torch.nan)}
    write_fp8_checkpoint(FORMATS[kind], tmp_path / "tied", tied, weights | head)
    model = load_model(ModelConfig.from_pretrained(tmp_path / "tied"), progress=False)
    assert not any(parameter.float().isnan().any() for parameter in model.parameters())
    untied = {name: tensor for name, tensor in weights.items() if name != "lm_head.weight"}
    write_fp8_checkpoint(FORMATS[kind], tmp_path / "untied", TINY_CONFIG, untied)
    with pytest.raises(CheckpointError, match=r"no tensor.*lm_head.weight"):
        load_model(ModelConfig.from_pretrained(tmp_path / "untied"), progress=False)


def compressed(**weights: Any) -> dict[str, Any]:
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "config_groups": {"group_0": {"targets": ["Linear"], "weights": weights}},
    }


# Name -> (changes of config.json, what the message names).
UNSUPPORTED: dict[str, tuple[dict[str, Any], str]] = {
    "MXFP8": ({"quantization_config": {"quant_method": "mxfp8"}}, "'mxfp8'"),
    "NVFP4": (
        {"quantization_config": {"quant_method": "modelopt", "quant_algo": "NVFP4"}},
        "'NVFP4'",
    ),
    "int4": (
        {"quantization_config": compressed(num_bits=4, type="int", strategy="group")},
        "4-bit int",
    ),
    "MXFP8 in compressed-tensors": (
        {
            "quantization_config": compressed(
                num_bits=8, type="float", strategy="group", group_size=32
            )
        },
        "group_size 32",
    ),
    "GPTQ": ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, "'gptq'"),
    "experts": (
        {"architectures": ["MixtralForCausalLM"], "num_local_experts": 8},
        "mixture-of-experts.*num_local_experts 8",
    ),
}


@pytest.mark.parametrize("scheme", UNSUPPORTED)
def test_unsupported_schemes_end_before_weights_are_opened(
    scheme: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    changes, named = UNSUPPORTED[scheme]
    (tmp_path / "config.json").write_text(json.dumps(TINY_CONFIG | changes))
    (tmp_path / "model.safetensors").write_bytes(b"not a weight file")
    with pytest.raises(UnsupportedConfigError, match=named) as info:
        load_model(ModelConfig.from_pretrained(tmp_path), progress=False)
    assert_cli_error(tmp_path, str(info.value), capsys)
