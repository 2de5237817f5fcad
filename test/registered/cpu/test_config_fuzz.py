"""Whatever a configuration file holds: it is read, or refused with an error that a user can act
on.
"""

import contextlib
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from srt.checkpoint.formats.registry import FORMATS as CONFIGS
from srt.checkpoint.formats.registry import get_quantization_config
from srt.checkpoint.mistral_form import to_hf_config
from srt.errors import SrtError
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_formats import FORMATS
from srt.test.mistral_form import to_params

register_cpu_ci(est_time=6, suite="per-commit")

PARAMS = to_params(
    {
        "hidden_size": 96,
        "intermediate_size": 200,
        "num_hidden_layers": 2,
        "num_attention_heads": 3,
        "num_key_value_heads": 1,
        "rms_norm_eps": 1e-5,
        "vocab_size": 1007,
        "max_position_embeddings": 256,
    }
) | {
    "yarn": {"factor": 2.0, "original_max_position_embeddings": 64},
    "llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 64},
    "quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TENSOR"},
    "multimodal": {"vision_encoder_args": {}},
    "moe": None,
}
METHODS = [config.names[0] for config in CONFIGS]
# What some file might hold where another value is expected.
VALUES = st.recursive(
    st.sampled_from([None, True, 0, -1, 128, 1.5, "", "fp8", "re:(", "re:.*", "*[", "128x128"])
    | st.sampled_from([*METHODS, "FP8", "FP8_PB_WO", "float", "block", "Linear"]),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(["weights", "targets", "format", "quantization"]), inner)
    ),
    max_leaves=6,
)


@st.composite
def changed(draw: st.DrawFn, source: dict[str, Any]) -> dict[str, Any]:
    """`source` with one to three values, at any depth, replaced or removed."""
    result = _copy(source)
    for _ in range(draw(st.integers(1, 3))):
        place: Any = result
        while True:
            key = draw(st.sampled_from(sorted(place)))
            if not isinstance(place[key], dict) or not place[key] or draw(st.booleans()):
                break
            place = place[key]
        place[key] = draw(VALUES)
    return result


def _copy(value: Any) -> Any:
    """A deep copy of JSON."""
    return {k: _copy(v) for k, v in value.items()} if isinstance(value, dict) else value


BLOCKS = st.sampled_from(sorted(FORMATS)).flatmap(
    lambda name: changed(
        {"quant_method": "modelopt"}
        | dict(FORMATS[name].quantization)
        | {FORMATS[name].skip_key or "modules_to_not_convert": ["lm_head"]}
    )
)


@given(block=BLOCKS | VALUES)
@example(block={"quant_method": ["fp8"]})
@example(block={"quant_method": "modelopt", "quantization": "FP8"})
@example(block={"quant_method": "compressed-tensors", "config_groups": {"group_0": None}})
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_quantization_blocks(block: Any) -> None:
    with contextlib.suppress(SrtError):
        config = get_quantization_config({"quantization_config": block})
        if config is not None:
            config.weight_formats("model.layers.0.mlp.up_proj", ())


@given(params=changed(PARAMS))
@settings(max_examples=400, deadline=None, derandomize=True, database=None)
def test_params(params: dict[str, Any]) -> None:
    with contextlib.suppress(SrtError):
        get_quantization_config(to_hf_config(params, Path("params.json")))
