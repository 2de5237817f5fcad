"""Lists of modules that stay unquantized: each format's syntax, under any wrapper's prefix."""

import pytest

from srt.checkpoint.formats.compressed_tensors import CompressedTensorsConfig
from srt.checkpoint.formats.fp8 import Fp8Config
from srt.checkpoint.formats.modelopt import ModelOptConfig
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=2, suite="per-commit")

PREFIXES = ["", "model.", "language_model.model.", "model.language_model."]


def compressed(
    targets: list[str] | None = None, ignore: list[str] | None = None
) -> CompressedTensorsConfig:
    weights = {"num_bits": 8, "type": "float", "strategy": "tensor"}
    group = {"targets": targets or ["Linear"], "weights": weights}
    return CompressedTensorsConfig.from_config(
        {"format": "float-quantized", "config_groups": {"group_0": group}, "ignore": ignore}
    )


@pytest.mark.parametrize("entry_prefix", PREFIXES)
@pytest.mark.parametrize("name_prefix", PREFIXES)
def test_skip_lists_match_under_any_wrapper(entry_prefix: str, name_prefix: str) -> None:
    config = Fp8Config.from_config(
        {"modules_to_not_convert": [f"{entry_prefix}layers.1.self_attn", f"{entry_prefix}lm_head"]}
    )
    assert config.is_ignored(f"{name_prefix}layers.1.self_attn.q_proj")
    assert config.is_ignored(f"{name_prefix}lm_head")
    assert not config.is_ignored(f"{name_prefix}layers.11.self_attn.q_proj")
    assert not config.is_ignored(f"{name_prefix}layers.1.mlp.up_proj")


def test_skip_entries_match_whole_components() -> None:
    config = Fp8Config.from_config({"ignored_layers": ["mlp.gate", "down_proj", "lm_head.weight"]})
    assert config.is_ignored("model.layers.0.mlp.gate")
    assert not config.is_ignored("model.layers.0.mlp.gate_proj")
    assert config.is_ignored("model.layers.7.mlp.down_proj")
    assert config.is_ignored("lm_head")


@pytest.mark.parametrize("entry_prefix", PREFIXES)
@pytest.mark.parametrize("name_prefix", PREFIXES)
@pytest.mark.parametrize(
    ("entry", "matched"),
    [
        (r"re:{}layers\.1\.self_attn.*", ["layers.1.self_attn.q_proj"]),
        ("re:.*self_attn.q_proj$", ["layers.1.self_attn.q_proj", "layers.2.self_attn.q_proj"]),
        ("{}layers.1.self_attn.q_proj", ["layers.1.self_attn.q_proj"]),
    ],
)
def test_expressions_of_compressed_tensors(
    entry_prefix: str, name_prefix: str, entry: str, matched: list[str]
) -> None:
    entry = entry.format(entry_prefix.replace(".", r"\.") if "re:" in entry else entry_prefix)
    config = compressed(ignore=[entry])
    for name in ("layers.1.self_attn.q_proj", "layers.2.self_attn.q_proj", "layers.1.mlp.up_proj"):
        assert config.is_ignored(name_prefix + name) == (name in matched)


@pytest.mark.parametrize("entry_prefix", PREFIXES)
@pytest.mark.parametrize("name_prefix", PREFIXES)
def test_wildcards_of_modelopt(entry_prefix: str, name_prefix: str) -> None:
    names = [f"{entry_prefix}layers.1.self_attn*", "*lm_head", f"{entry_prefix}layers.*.mlp.gate"]
    config = ModelOptConfig.from_config({"quant_algo": "FP8", "exclude_modules": names})
    assert config.is_ignored(f"{name_prefix}layers.1.self_attn.q_proj")
    assert config.is_ignored(f"{name_prefix}lm_head")
    assert config.is_ignored(f"{name_prefix}layers.3.mlp.gate")
    assert not config.is_ignored(f"{name_prefix}layers.3.mlp.gate_proj")
    assert not config.is_ignored(f"{name_prefix}layers.11.self_attn.q_proj")


@pytest.mark.parametrize(
    ("targets", "ignored"),
    [
        (["Linear"], []),
        (["re:.*mlp.*"], ["self_attn.q_proj"]),
        (["model.layers.0.self_attn.q_proj"], ["mlp.up_proj"]),
    ],
)
def test_targets_of_compressed_tensors(targets: list[str], ignored: list[str]) -> None:
    config = compressed(targets)
    for name in ("self_attn.q_proj", "mlp.up_proj"):
        assert config.is_ignored(f"model.layers.0.{name}") == (name in ignored)
