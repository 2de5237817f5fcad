"""Log-probabilities of every architecture, in every format that it is published in, against
transformers' own model in float32 over the dequantised weights.
"""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from packaging.version import Version
from safetensors.torch import load_file, save_file
from transformers import LlamaConfig
from transformers.models.llama.modeling_llama import LlamaRotaryEmbedding

from srt.configs.model_config import ModelConfig
from srt.layers.rotary_embedding import RotaryEmbedding, get_rope
from srt.model_executor.cpu_graph_runner import MIN_TORCH
from srt.models import llama
from srt.models.decoder_layer import LayerOptions
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
from srt.test.tiny_models import (
    ARCHITECTURES,
    Session,
    make_tensors,
    reference_log_probs,
    reference_model,
)

register_cpu_ci(est_time=60, suite="per-commit")

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


def test_layers_are_given_the_rotary_embedding_that_they_name(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model with two, as Gemma 3, against transformers' with the other one in layer 1."""
    config = ARCHITECTURES["llama"]
    local = LlamaConfig(
        head_dim=config["head_dim"], rope_parameters={"rope_type": "default", "rope_theta": 1e4}
    )

    class TwoRopes(llama.LlamaForCausalLM):
        def make_ropes(self) -> dict[str, RotaryEmbedding]:
            return {**super().make_ropes(), "local": get_rope(local, config["head_dim"], 128)}

        def layer_options(self, layer_id: int) -> LayerOptions:
            options = super().layer_options(layer_id)
            return replace(options, rope="local") if layer_id == 1 else options

    def with_local(_: Any, args: Any, kwargs: dict[str, Any]) -> Any:
        positions = torch.arange(len(TOKENS))[None]
        return args, {
            **kwargs,
            "position_embeddings": LlamaRotaryEmbedding(local)(args[0], positions),
        }

    weights = write_model(tmp_path, "bf16", config, make_tensors(config))
    plain = reference_model(config, weights)
    model = reference_model(config, weights)
    model.model.layers[1].register_forward_pre_hook(with_local, with_kwargs=True)
    with torch.inference_mode():
        one, two = (m(torch.tensor([TOKENS])).logits[0].log_softmax(-1) for m in (plain, model))
    assert (one - two)[PROMPT_LEN - 1 :].abs().max() > 2 * TOLERANCES["bfloat16"]
    monkeypatch.setattr(llama, "LlamaForCausalLM", TwoRopes)
    assert largest_difference(ModelCase(tmp_path, two), "float32") < TOLERANCES["float32"]


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


# As DeepSeek-V3's own: a head's keys are one block of rows, its values too, the latent several.
ALIGNED = {**ARCHITECTURES["deepseek-v3"], "qk_nope_head_dim": 40, "v_head_dim": 40}


@pytest.mark.parametrize(
    ("fmt", "config", "dtype"),
    [
        ("bf16", ARCHITECTURES["deepseek-v3"], torch.bfloat16),
        ("autofp8-dynamic", ARCHITECTURES["deepseek-v3"], torch.float8_e4m3fn),
        ("fbgemm", ARCHITECTURES["deepseek-v3"], torch.float8_e4m3fn),
        ("deepseek-small-blocks", ALIGNED, torch.float8_e4m3fn),
        ("deepseek-small-blocks", ARCHITECTURES["deepseek-v3"], torch.bfloat16),
    ],
    ids=["bf16", "per tensor", "per channel", "aligned blocks", "blocks across heads"],
)
def test_absorbed_weights_stay_fp8(
    fmt: str, config: dict[str, Any], dtype: torch.dtype, tmp_path: Path
) -> None:
    weights = write_model(tmp_path, fmt, config, make_tensors(config))
    case = ModelCase(tmp_path, reference_log_probs(config, weights, TOKENS))
    model = Session(tmp_path, "float16").runner.runner.model
    parameters = dict(model.named_parameters())
    absorbed = [f"model.layers.0.self_attn.kv_b_proj.{name}.weight" for name in ("w_kc", "w_vc")]
    assert {parameters[name].dtype for name in absorbed} == {dtype}
    assert "model.layers.0.self_attn.kv_b_proj.weight" not in parameters
    # An FP8 weight is exact, so only activations are rounded.
    tolerance = 0.012 if dtype == torch.float8_e4m3fn else TOLERANCES["float16"]
    assert largest_difference(case, "float16") < tolerance
    assert largest_difference(case, "float32") < TOLERANCES["float32"]


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


@pytest.mark.parametrize("key", ["num_nextn_predict_layers", "num_mtp_layers"])
def test_layers_that_predict_further_tokens_are_skipped(key: str, tmp_path: Path) -> None:
    config = ARCHITECTURES["deepseek-v3"]
    tensors = make_tensors(config)
    write_model(tmp_path / "without", "bf16", config, tensors)
    extra = {"model.layers.2.eh_proj.weight": torch.zeros(3, 5)}
    absent = {k: v for k, v in config.items() if k != "num_nextn_predict_layers"}
    write_model(tmp_path / "with", "bf16", {**absent, key: 1}, tensors | extra)
    results = [Session(tmp_path / name, "float16").prefill(TOKENS) for name in ("without", "with")]
    assert torch.equal(*results)


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_packed_cache_of_latent_attention(dtype: str, tmp_path: Path) -> None:
    config = ARCHITECTURES["deepseek-v3"]
    write_model(tmp_path / "model", "fbgemm", config, make_tensors(config))
    first = Session(tmp_path / "model", dtype).prefill(TOKENS)
    for _ in range(2):  # written, then read
        session = Session(tmp_path / "model", dtype, packed_cache=tmp_path / "cache")
        assert torch.equal(session.prefill(TOKENS), first)


@pytest.mark.parametrize("scheme", ["fp8", "fp8-per-channel", "fp8-block"])
def test_latent_attention_is_quantized_while_loading(scheme: str, tmp_path: Path) -> None:
    config = ARCHITECTURES["deepseek-v3"]
    write_model(tmp_path, "bf16", config, make_tensors(config))
    exact = Session(tmp_path, "float32", quantization=scheme).prefill(TOKENS)
    plain = Session(tmp_path, "float32").prefill(TOKENS)
    rounded = Session(tmp_path, "float16", quantization=scheme).prefill(TOKENS)
    assert (rounded - exact).abs().max() < TOLERANCES["float16"]
    assert (exact - plain).abs().max() > 2 * TOLERANCES["float16"]


@pytest.mark.parametrize("architecture", ["ministral3", "qwen3", "deepseek-v3"])
def test_compiled_decode(architecture: str, tmp_path: Path) -> None:
    """Query scale and window, norms of heads, latent attention with scales along columns."""
    if Version(Version(torch.__version__).base_version) < Version(MIN_TORCH):
        pytest.skip(f"graph mode needs Torch {MIN_TORCH}")
    config = ARCHITECTURES[architecture]
    write_model(tmp_path, "fbgemm", config, make_tensors(config))
    eager = Session(tmp_path, "float16", disable_graph=True)
    compiled = Session(tmp_path, "float16", enable_torch_compile=True, compiled_batch_sizes=[1])
    for session in (eager, compiled):
        session.prefill(TOKENS[:PROMPT_LEN])
    for token in TOKENS[PROMPT_LEN:]:
        torch.testing.assert_close(
            compiled.decode(token), eager.decode(token), rtol=0, atol=TOLERANCES["float16"]
        )
