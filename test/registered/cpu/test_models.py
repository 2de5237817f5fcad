"""Log-probabilities of every architecture, in every format that it is published in, against
transformers' own model in float32 over the dequantised weights.
"""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from srt.configs.model_config import ModelConfig
from srt.test.ci_register import register_cpu_ci
from srt.test.contiguous_runner import ContiguousRunner, ExtendInput
from srt.test.fp8_checkpoints import FORMATS, write_fp8_checkpoint
from srt.test.model_cases import (
    PROMPT_LEN,
    PUBLISHED,
    TOKENS,
    TOLERANCES,
    ModelCase,
    largest_difference,
    make_case,
    write_model,
)
from srt.test.tiny_models import ARCHITECTURES, Session, make_tensors, reference_log_probs

register_cpu_ci(est_time=30, suite="per-commit")

PAIRS = [(fmt, architecture) for fmt, names in PUBLISHED.items() for architecture in names]


@pytest.fixture(scope="module", params=PAIRS, ids="-".join)
def case(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> ModelCase:
    return make_case(tmp_path_factory.mktemp("model"), *request.param)


@pytest.mark.parametrize("dtype", TOLERANCES)
def test_log_probabilities(case: ModelCase, dtype: str) -> None:
    assert largest_difference(case, dtype) < TOLERANCES[dtype]


# What a configuration would be without the option that a case above is there for.
WITHOUT: dict[str, tuple[str, dict[str, Any]]] = {
    "llama3": ("llama", {"rope_parameters": {"rope_type": "default", "rope_theta": 500.0}}),
    "linear": ("llama-bias", {"rope_parameters": {"rope_type": "default", "rope_theta": 1e4}}),
    "NoPE": ("smollm3", {"no_rope_layers": [1, 1]}),
    "window": ("mistral", {"sliding_window": None}),
    "window in one layer": ("ministral", {"layer_types": ["full_attention"] * 2}),
    "Qwen's window": ("qwen2-window", {"use_sliding_window": False}),
    "query scale": (
        "ministral3",
        {
            "rope_parameters": ARCHITECTURES["ministral3"]["rope_parameters"]
            | {"llama_4_scaling_beta": 0.0}
        },
    ),
    "yarn": (
        "ministral3",
        {
            "rope_parameters": {
                "rope_type": "default",
                "rope_theta": 1e4,
                "llama_4_scaling_beta": 0.3,
                "original_max_position_embeddings": 16,
            }
        },
    ),
    "mscale": (
        "deepseek-v3",
        {
            "rope_parameters": ARCHITECTURES["deepseek-v3"]["rope_parameters"]
            | {"mscale": 0.0, "mscale_all_dim": 0.0}
        },
    ),
    "interleaved": ("deepseek-v3", {"rope_interleave": False}),
}


@pytest.mark.parametrize("option", WITHOUT)
def test_the_cases_above_depend_on_their_options(option: str) -> None:
    architecture, change = WITHOUT[option]
    config = ARCHITECTURES[architecture]
    weights = {name: tensor.float() for name, tensor in make_tensors(config).items()}
    with_it = reference_log_probs(config, weights, TOKENS)
    without = reference_log_probs({**config, **change}, weights, TOKENS)
    assert (with_it - without)[PROMPT_LEN - 1 :].abs().max() > 2 * TOLERANCES["bfloat16"]


@pytest.mark.parametrize("architecture", ["mistral", "ministral3", "qwen3", "deepseek-v3"])
def test_a_batch_computes_what_each_request_computes_alone(
    architecture: str, tmp_path: Path
) -> None:
    config = ARCHITECTURES[architecture]
    write_model(tmp_path, "autofp8-static", config, make_tensors(config))
    runner = ContiguousRunner(ModelConfig.from_pretrained(tmp_path), max_total_tokens=100)
    inputs = [
        ExtendInput(TOKENS[:30], 0, 1),
        ExtendInput(TOKENS[3:8], 0, 40),
        ExtendInput(TOKENS[9:10], 0, 60),
    ]
    alone = torch.cat([runner.extend([request]) for request in inputs])
    assert torch.equal(runner.extend(inputs), alone)


def test_activation_scales_change_nothing(tmp_path: Path) -> None:
    config = ARCHITECTURES["deepseek-v3"]
    tensors = make_tensors(config)
    results = []
    for value in (1e-6, 1e6):
        path = tmp_path / str(value)
        write_fp8_checkpoint(FORMATS["modelopt"], path, config, tensors, activation_scale=value)
        results.append(Session(path, "float16").prefill(TOKENS))
    assert torch.equal(*results)


@pytest.mark.parametrize(
    ("architecture", "elements"),
    [
        ("llama", 2 * 3 * 32),
        ("qwen2", 2 * 3 * 32),
        ("mistral3", 2 * 3 * 32),
        ("deepseek-v2", 72 + 16),
        ("deepseek-v3", 72 + 16),
    ],
)
def test_cache_bytes_of_a_token(architecture: str, elements: int, tmp_path: Path) -> None:
    """Latent attention holds the latent and the rotary part once, whatever the heads."""
    config = ARCHITECTURES[architecture]
    write_model(tmp_path, "bf16", config, make_tensors(config))
    layout = ModelConfig.from_pretrained(tmp_path).kv_layout
    assert layout.bytes_per_token(2) == 2 * elements * 2


@pytest.mark.parametrize(
    ("fmt", "dtype"),
    [
        ("bf16", torch.bfloat16),
        ("autofp8-dynamic", torch.float8_e4m3fn),
        ("mistral-hf-channel", torch.bfloat16),
    ],
)
def test_absorbed_weights_stay_fp8_where_a_head_has_one_scale(
    fmt: str, dtype: torch.dtype, tmp_path: Path
) -> None:
    config = ARCHITECTURES["deepseek-v3"]
    write_model(tmp_path, fmt, config, make_tensors(config))
    model = Session(tmp_path, "float16").runner.runner.model
    held = {p.dtype for name, p in model.named_parameters() if name.endswith((".w_kc", ".w_vc"))}
    assert held == {dtype}
    assert not any("kv_b_proj.weight" in name for name, _ in model.named_parameters())


def test_names_as_ministral3_is_published(tmp_path: Path) -> None:
    config = ARCHITECTURES["mistral3"]
    tensors = make_tensors(config)
    results = []
    for spelling in ("transformers", "published"):
        path = tmp_path / spelling
        if spelling == "published":
            tensors = {
                name.replace("model.language_model.", "language_model.model.")
                .replace("model.vision_tower.", "vision_tower.")
                .replace("model.multi_modal_projector.", "multi_modal_projector.")
                .replace("lm_head.", "language_model.lm_head."): tensor
                for name, tensor in tensors.items()
            }
        write_model(path, "mistral-hf", config, tensors)
        results.append(Session(path, "float16").prefill(TOKENS))
    assert torch.equal(*results)


def test_vision_tower_in_mistrals_own_form(tmp_path: Path) -> None:
    config = ARCHITECTURES["ministral3"]
    write_model(tmp_path, "mistral-own", config, make_tensors(config))
    alone = Session(tmp_path, "float16").prefill(TOKENS)
    params = json.loads((tmp_path / "params.json").read_text())
    (tmp_path / "params.json").write_text(json.dumps(params | {"vision_encoder": {"dim": 32}}))
    vision = ("vision_encoder.ln_pre", "patch_merger.merging_layer", "vision_language_adapter.w_in")
    file = tmp_path / "consolidated.safetensors"
    tensors = load_file(file) | {f"{name}.weight": torch.zeros(3, 5) for name in vision}
    save_file(tensors, file)
    assert torch.equal(Session(tmp_path, "float16").prefill(TOKENS), alone)


def test_layers_that_predict_further_tokens_are_skipped(tmp_path: Path) -> None:
    config = ARCHITECTURES["deepseek-v3"]
    tensors = make_tensors(config)
    write_model(tmp_path / "without", "bf16", config, tensors)
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(3, 5)}
    write_model(
        tmp_path / "with", "bf16", {**config, "num_nextn_predict_layers": 1}, tensors | extra
    )
    results = [Session(tmp_path / name, "float16").prefill(TOKENS) for name in ("without", "with")]
    assert torch.equal(*results)
