#!/usr/bin/env python3
"""Writes the checkpoints of test/registered/cpu/data/formats with the tools that people quantize
with: tiny Llama models, as each tool writes them today.

    scripts/make_format_fixtures.py             # all tools
    scripts/make_format_fixtures.py modelopt    # one

Each tool runs in an environment of its own below build/format-fixtures, with the versions that
TOOLS pins; Torch is what `pip install torch==...` gives there, so set an index with CPU builds if
the default one has CUDA. Models and calibration are seeded. A fixture is replaced as a whole.
"""

import argparse
import importlib
import importlib.metadata
import json
import shutil
import subprocess
import tempfile
import venv
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[1]
OUT = ROOT / "test/registered/cpu/data/formats"
ENVIRONMENTS = ROOT / "build/format-fixtures"

TORCH = "torch==2.13.0"


@dataclass(frozen=True)
class Tool:
    """A tool and what it needs.

    Attributes:
        name: Its distribution.
        version: The version that writes.
        needs: Further requirements.
        bare: Requirements whose own dependencies are not installed: they bring CUDA or more than is
            imported.
    """

    name: str
    version: str
    needs: tuple[str, ...] = ()
    bare: tuple[str, ...] = ()


TOOLS: Mapping[str, Tool] = {
    "transformers": Tool("transformers", "5.24.0", ("accelerate==1.15.0",)),
    "llmcompressor": Tool(
        "llmcompressor",
        "0.14.0.1",
        # What this version asks for; later releases of both are refused by it.
        ("transformers==5.17.0", "accelerate==1.15.0", "loguru", "requests", "pillow", "datasets"),
        ("compressed-tensors==0.19.0", "auto-round==0.15.1", "py-cpuinfo", "nvidia-ml-py"),
    ),
    "modelopt": Tool(
        "nvidia-modelopt",
        "0.47.0",
        (
            "transformers==5.24.0",
            "accelerate==1.15.0",
            *("ninja", "omegaconf", "pulp", "pydantic", "requests", "rich", "scipy"),
        ),
        ("nvidia-ml-py",),
    ),
}


def make_model(layers: int = 2, intermediate_size: int = 64) -> Any:
    """A seeded Llama whose weights differ enough for scales to matter."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(14)
    config = LlamaConfig(
        architectures=["LlamaForCausalLM"],
        vocab_size=64,
        hidden_size=64,
        intermediate_size=intermediate_size,
        num_hidden_layers=layers,
        num_attention_heads=4,
        num_key_value_heads=2,
        max_position_embeddings=64,
        initializer_range=0.15,
        tie_word_embeddings=False,
        bos_token_id=None,
        eos_token_id=0,
    )
    model = LlamaForCausalLM(config).to(torch.bfloat16).eval()
    with torch.no_grad():
        for i, parameter in enumerate(model.parameters()):
            if parameter.dim() == 2:
                parameter.mul_(1 + i % 5 / 4)
            else:
                parameter.copy_(torch.linspace(0.5, 1.5, parameter.numel()))
    return model


def calibration() -> Any:
    """Token ids `[4, 16]`."""
    import torch

    return torch.randint(0, 64, (4, 16), generator=torch.Generator().manual_seed(15))


# transformers


def write_transformers(directory: Path, **options: Any) -> None:
    """Quantizes with transformers' `FineGrainedFP8Config`, whose check for a GPU is left out: it
    is for running, and nothing is run.
    """
    from transformers import AutoModelForCausalLM

    name = "transformers.quantizers.quantizer_finegrained_fp8"
    importlib.import_module(name).FineGrainedFP8HfQuantizer.validate_environment = (
        lambda *args, **kwargs: None
    )
    config = importlib.import_module("transformers").FineGrainedFP8Config(**options)
    with tempfile.TemporaryDirectory() as source:
        make_model().save_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(
            source,
            quantization_config=config,
            dtype="auto",
            device_map="cpu",
            trust_remote_code=False,
        )
        model.save_pretrained(directory)


# llm-compressor


def write_llmcompressor(directory: Path, **options: Any) -> None:
    """Quantizes with llm-compressor's `QuantizationModifier`."""
    llmcompressor = importlib.import_module("llmcompressor")
    modifiers = importlib.import_module("llmcompressor.modifiers.quantization")
    datasets = importlib.import_module("datasets")
    tokenizers = importlib.import_module("tokenizers")
    from transformers import AutoModelForCausalLM, PreTrainedTokenizerFast

    words = tokenizers.models.WordLevel({"0": 0}, unk_token="0")
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=tokenizers.Tokenizer(words), pad_token="0")
    recipe = modifiers.QuantizationModifier(**options)
    ids = calibration().tolist()
    rows = {"input_ids": ids, "attention_mask": [[1] * len(row) for row in ids]}
    with tempfile.TemporaryDirectory() as source:
        make_model().save_pretrained(source)
        model = AutoModelForCausalLM.from_pretrained(source, dtype="auto", trust_remote_code=False)
        llmcompressor.oneshot(
            model=model,
            recipe=recipe,
            processor=tokenizer,
            dataset=datasets.Dataset.from_dict(rows),
            num_calibration_samples=len(ids),
            max_seq_length=len(ids[0]),
            pipeline="basic",
        )
        model.save_pretrained(directory, save_compressed=True)


def _weights(strategy: str, **more: Any) -> dict[str, Any]:
    scheme = {"num_bits": 8, "type": "float", "symmetric": True, "strategy": strategy, **more}
    return {"weights": scheme}


# ModelOpt


def write_modelopt(directory: Path, name: str, *, kv_cache: bool = False, **sizes: int) -> None:
    """Quantizes a model of `sizes` with one of ModelOpt's own configurations."""
    import torch

    quantization = importlib.import_module("modelopt.torch.quantization")
    export = importlib.import_module("modelopt.torch.export")
    model = make_model(**sizes)
    config = getattr(quantization, name)
    if kv_cache:
        update = importlib.import_module("modelopt.torch.quantization.utils")
        config = update.update_quant_cfg_with_kv_cache_quant(
            config, quantization.FP8_KV_CFG["quant_cfg"]
        )

    def calibrate(model: Any) -> None:
        with torch.no_grad():
            model(calibration())

    quantization.quantize(model, config, calibrate)
    with torch.inference_mode():
        export.export_hf_checkpoint(model, export_dir=str(directory))


# Tool -> fixture's name -> writer.
FIXTURES: Mapping[str, Mapping[str, Callable[[Path], None]]] = {
    "transformers": {
        "block": lambda d: write_transformers(d, weight_block_size=(32, 16)),
        "ue8m0": lambda d: write_transformers(d, weight_block_size=(16, 16), scale_fmt="ue8m0"),
        "skip": lambda d: write_transformers(
            d,
            weight_block_size=(16, 16),
            modules_to_not_convert=["lm_head", "model.layers.0.self_attn.q_proj", "up_proj"],
        ),
        "tensor": lambda d: write_transformers(d, weight_block_size=None),
    },
    "llmcompressor": {
        "static-kv": lambda d: write_llmcompressor(
            d,
            targets="Linear",
            scheme="FP8",
            ignore=["lm_head"],
            kv_cache_scheme={"num_bits": 8, "type": "float", "symmetric": True}
            | {"strategy": "tensor", "dynamic": False},
        ),
        "dynamic": lambda d: write_llmcompressor(
            d, targets="Linear", scheme="FP8_DYNAMIC", ignore=["re:.*lm_head", "re:.*q_proj$"]
        ),
        "block": lambda d: write_llmcompressor(
            d, targets="Linear", scheme="FP8_BLOCK", ignore=["lm_head"]
        ),
        # Three strategies in one merged layer, and lm_head.
        "groups": lambda d: write_llmcompressor(
            d,
            config_groups={
                "tensors": {"targets": ["re:.*q_proj$", "re:.*down_proj$"], **_weights("tensor")},
                "channels": {"targets": ["re:.*k_proj$", "lm_head"], **_weights("channel")},
                "blocks": {
                    "targets": ["re:.*v_proj$", "re:.*gate_proj$"],
                    **_weights("block", block_structure=[16, 16]),
                },
                "large blocks": {
                    "targets": ["re:.*up_proj$"],
                    **_weights("block", block_structure=[32, 64]),
                },
            },
        ),
    },
    "modelopt": {
        "fp8-kv": lambda d: write_modelopt(d, "FP8_DEFAULT_CFG", kv_cache=True),
        "channel": lambda d: write_modelopt(d, "FP8_PER_CHANNEL_PER_TOKEN_CFG"),
        # Large enough for more than one block of 128, the last one ragged.
        "block": lambda d: write_modelopt(
            d, "FP8_2D_BLOCKWISE_WEIGHT_ONLY_CFG", layers=1, intermediate_size=192
        ),
    },
}

# What a test reads; tools write more, such as recipes.
_KEPT = ("config.json", "hf_quant_config.json", "model.safetensors")


def write_fixtures(name: str) -> None:
    """Writes one tool's fixtures; to be run in its environment."""
    tool = TOOLS[name]
    found = importlib.metadata.version(tool.name)
    if found != tool.version:
        raise SystemExit(f"error: {tool.name} {tool.version} is to write; {found} is installed")
    for fixture, write in FIXTURES[name].items():
        target = OUT / f"{name}-{tool.version}-{fixture}"
        with tempfile.TemporaryDirectory() as scratch:
            write(Path(scratch))
            shutil.rmtree(target, ignore_errors=True)
            target.mkdir(parents=True)
            for file in _KEPT:
                if (Path(scratch) / file).is_file():
                    shutil.copyfile(Path(scratch) / file, target / file)
        _tidy(target / "config.json")
        size = sum(file.stat().st_size for file in target.iterdir())
        print(f"{target.relative_to(ROOT)}: {size:,} bytes")


def _tidy(file: Path) -> None:
    """Ends the file with a line's end, as git and editors want it; the content stays."""
    file.write_text(json.dumps(json.loads(file.read_text()), indent=2) + "\n")


def make_environment(name: str) -> Path:
    """The interpreter of a tool's environment, which is made anew unless it was completed with the
    requirements that TOOLS has.
    """
    tool, folder = TOOLS[name], ENVIRONMENTS / name
    python, stamp = folder / "bin/python", folder / "requirements.txt"
    requirements = [TORCH, "numpy", "safetensors", *tool.needs]
    bare = [*tool.bare, f"{tool.name}=={tool.version}"]
    content = "\n".join([*requirements, *bare, ""])
    if not stamp.is_file() or stamp.read_text() != content:
        print(f"making {folder}", flush=True)
        venv.create(folder, with_pip=True, clear=True)
        pip = [str(python), "-m", "pip", "install", "-q"]
        subprocess.run([*pip, *requirements], check=True)
        subprocess.run([*pip, "--no-deps", *bare], check=True)
        stamp.write_text(content)
    return python


def main() -> None:
    """Makes environments and calls itself in them."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0])
    parser.add_argument("tools", nargs="*", metavar="TOOL", help=f"of {', '.join(TOOLS)}; all")
    parser.add_argument("--here", action="store_true", help="in this environment")
    options = parser.parse_args()
    unknown = [name for name in options.tools if name not in TOOLS]
    if unknown:
        parser.error(f"unknown tool {unknown[0]!r}; expected one of {', '.join(TOOLS)}")
    for name in options.tools or TOOLS:
        if options.here:
            write_fixtures(name)
        else:
            python = make_environment(name)
            subprocess.run([str(python), __file__, "--here", name], check=True)


if __name__ == "__main__":
    main()
