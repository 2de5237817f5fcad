"""Measures loading: peak memory and time, against the checkpoint's size and the time that reading
and packing its bytes takes.

    python scripts/bench_load.py [--model DIR] [--rounds 3] [--json]

Without `--model` a random checkpoint of Llama 3.2 1B's shape in FP8 per tensor is written to a
temporary directory (1.5 GB) and removed at the end. Every measurement is a fresh process over files
that are in the page cache:

- `read and pack`: each tensor's bytes read into memory and, if it is a matrix, packed by the
  kernels; the least that a loader can do.
- `load`: `load_model`. Its peak memory is the process's, imports and all.
- `first start`, `second start`: the same with a packed cache, which the first start writes.
"""

from __future__ import annotations

import argparse
import json
import os
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.table import Table

import sgl_kernel
from srt.checkpoint.dtypes import FP8_DTYPE
from srt.checkpoint.writer import CheckpointWriter, TensorSpec
from srt.configs.model_config import ModelConfig
from srt.layers.dtypes import TORCH_DTYPES
from srt.model_loader.loader import load_model
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
from srt.model_loader.tensors import write_tensor
from srt.utils.openmp import spin_limit
from srt.utils.process_memory import peak_rss

# The bounds that the project holds itself to.
MEMORY_FACTOR, MEMORY_EXTRA, TIME_FACTOR = 1.2, 400e6, 3.0

CACHE = "packed-cache"
# In the order in which they are run: the first start needs an empty cache.
MEASUREMENTS = {
    "read and pack": "read_and_pack",
    "load": "load",
    "first start": "load_cached",
    "second start": "load_cached",
}

LLAMA_1B: dict[str, Any] = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "hidden_size": 2048,
    "intermediate_size": 8192,
    "num_hidden_layers": 16,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "rope_theta": 500000.0,
    "hidden_act": "silu",
    "tie_word_embeddings": True,
    "dtype": "bfloat16",
    "quantization_config": {"quant_method": "fp8", "activation_scheme": "dynamic"},
}


def write_checkpoint(directory: Path, config: dict[str, Any], max_shard_size: int) -> None:
    """Writes a Llama checkpoint of random FP8 weights; every linear layer has its own scale."""
    hidden, inner = config["hidden_size"], config["intermediate_size"]
    query = config["num_attention_heads"] * config["head_dim"]
    kv = config["num_key_value_heads"] * config["head_dim"]
    linear = {
        "self_attn.q_proj": (query, hidden),
        "self_attn.k_proj": (kv, hidden),
        "self_attn.v_proj": (kv, hidden),
        "self_attn.o_proj": (hidden, query),
        "mlp.gate_proj": (inner, hidden),
        "mlp.up_proj": (inner, hidden),
        "mlp.down_proj": (hidden, inner),
    }
    specs = [TensorSpec("model.embed_tokens.weight", "BF16", (config["vocab_size"], hidden))]
    for i in range(config["num_hidden_layers"]):
        for norm in ("input_layernorm", "post_attention_layernorm"):
            specs.append(TensorSpec(f"model.layers.{i}.{norm}.weight", "BF16", (hidden,)))
        for name, shape in linear.items():
            specs.append(TensorSpec(f"model.layers.{i}.{name}.weight", FP8_DTYPE, shape))
            specs.append(TensorSpec(f"model.layers.{i}.{name}.weight_scale", "F32", ()))
    specs.append(TensorSpec("model.norm.weight", "BF16", (hidden,)))
    if not config["tie_word_embeddings"]:
        specs.append(TensorSpec("lm_head.weight", "BF16", (config["vocab_size"], hidden)))
    generator = torch.Generator().manual_seed(0)
    with CheckpointWriter(directory, specs, max_shard_size) as writer:
        for spec in specs:
            dtype = TORCH_DTYPES[spec.dtype]
            if spec.dtype == FP8_DTYPE:
                # Random bytes without NaN (0x7F and 0xFF).
                codes = torch.randint(0, 126, spec.shape, dtype=torch.uint8, generator=generator)
                write_tensor(writer, spec.name, codes.view(dtype))
            else:
                values = torch.rand(spec.shape, generator=generator).add_(0.01)
                write_tensor(writer, spec.name, values.to(dtype))
    (directory / "config.json").write_text(json.dumps(config, indent=2))


def read_and_pack(path: Path) -> float:
    """Seconds to read all bytes and to pack the matrices, with nothing checked or kept in order."""
    start = time.perf_counter()
    kept = []
    with MappedCheckpoint.open(path) as checkpoint:
        for meta in checkpoint:
            data = torch.empty(meta.shape, dtype=TORCH_DTYPES[meta.dtype])
            data.copy_(checkpoint.get(meta.name))
            kept.append(sgl_kernel.convert_weight_packed(data) if data.dim() == 2 else data)
            checkpoint.release()
    return time.perf_counter() - start


def load(path: Path, packed_cache: Path | None = None) -> float:
    """Seconds that `load_model` takes."""
    config = ModelConfig.from_pretrained(path)
    start = time.perf_counter()
    load_model(config, progress=False, packed_cache=packed_cache)
    return time.perf_counter() - start


def load_cached(path: Path) -> float:
    """Seconds that `load_model` takes with the packed cache beside the checkpoint's files."""
    return load(path, path / CACHE)


TASKS: dict[str, Callable[[Path], float]] = {
    "read_and_pack": read_and_pack,
    "load": load,
    "load_cached": load_cached,
}


def run_task(task: str, path: Path) -> dict[str, float]:
    """Seconds and peak resident bytes of one task in a process of its own."""
    command = [sys.executable, __file__, "--task", task, "--model", str(path)]
    environment = os.environ | spin_limit(os.environ)  # as `srt` does
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=True, env=environment)
    facts: dict[str, float] = json.loads(result.stdout)
    return facts


def measure(path: Path, rounds: int) -> dict[str, Any]:
    """All figures; times are medians over `rounds` in which the tasks take turns."""
    runs: dict[str, list[dict[str, float]]] = {}
    for _ in range(rounds):
        shutil.rmtree(path / CACHE, ignore_errors=True)
        for name, task in MEASUREMENTS.items():
            runs.setdefault(name, []).append(run_task(task, path))
            os.sync()  # what the first start wrote must not slow down what comes next
    nbytes = sum(file.stat().st_size for file in path.glob("*.safetensors"))
    medians = {
        name: {key: statistics.median(r[key] for r in runs[name]) for key in runs[name][0]}
        for name in MEASUREMENTS
    }
    peak = max(r["peak_rss_bytes"] for r in runs["load"])
    ratio = medians["load"]["seconds"] / medians["read and pack"]["seconds"]
    return {
        "checkpoint_bytes": nbytes,
        "threads": torch.get_num_threads(),
        "isa_tier": sgl_kernel.cpu_info()["tier"],
        "medians": medians,
        "peak_rss_bytes": peak,
        "peak_rss_ratio": peak / nbytes,
        "peak_rss_bound_bytes": MEMORY_FACTOR * nbytes + MEMORY_EXTRA,
        "load_time_ratio": ratio,
        "load_time_bound": TIME_FACTOR,
        "within_bounds": peak <= MEMORY_FACTOR * nbytes + MEMORY_EXTRA and ratio <= TIME_FACTOR,
    }


def show(facts: dict[str, Any]) -> None:
    """Prints the figures for people."""
    table = Table(
        title=f"Loading {facts['checkpoint_bytes'] / 1e9:.2f} GB, {facts['threads']} threads, "
        f"{facts['isa_tier']}",
        title_justify="left",
    )
    for heading in ("", "seconds", "GB/s", "peak memory"):
        table.add_column(heading, justify="right" if heading else "left")
    for name, median in facts["medians"].items():
        seconds, peak = median["seconds"], median["peak_rss_bytes"]
        speed = facts["checkpoint_bytes"] / seconds / 1e9
        table.add_row(name, f"{seconds:.2f}", f"{speed:.2f}", f"{peak / 1e9:.2f} GB")
    console = Console(highlight=False)
    console.print(table)
    console.print(
        f"peak memory {facts['peak_rss_bytes'] / 1e9:.2f} GB, {facts['peak_rss_ratio']:.2f} x the "
        f"checkpoint; bound {facts['peak_rss_bound_bytes'] / 1e9:.2f} GB ({MEMORY_FACTOR} x + "
        f"{MEMORY_EXTRA / 1e6:.0f} MB)"
    )
    console.print(
        f"loading takes {facts['load_time_ratio']:.2f} x the time of reading and packing; bound "
        f"{TIME_FACTOR:.0f} x"
    )


def main() -> int:
    """Measures and prints; exit status 1 if a bound is exceeded."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n\n")[0])
    parser.add_argument(
        "--model", type=Path, metavar="DIR", help="a checkpoint instead of a random one"
    )
    parser.add_argument("--rounds", type=int, default=3, metavar="N")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument("--task", choices=TASKS, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if args.task is not None:
        seconds = TASKS[args.task](args.model)
        print(json.dumps({"seconds": seconds, "peak_rss_bytes": peak_rss()}))
        return 0
    with tempfile.TemporaryDirectory() as scratch:
        path = Path(scratch)
        if args.model is None:
            write_checkpoint(path, LLAMA_1B, 1_000_000_000)
        else:
            # Links, so that the cache is beside them and not in the user's directory.
            for file in args.model.resolve().iterdir():
                (path / file.name).symlink_to(file)
        facts = measure(path, args.rounds)
    if args.json:
        print(json.dumps(facts, indent=2))
    else:
        show(facts)
    return 0 if facts["within_bounds"] else 1


if __name__ == "__main__":
    sys.exit(main())
