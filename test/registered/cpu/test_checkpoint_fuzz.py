"""Whatever a checkpoint's files hold: it runs, or one error names what is wrong, and `srt inspect`
says the same.

Mutations of every small file of tiny checkpoints, always the same ones for a seed; the full suite
tries 2,000, the per-commit suite 200.
"""

import contextlib
import copy
import json
import logging
import random
import shutil
import time
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from srt import Engine, SamplingParams
from srt.errors import SrtError
from srt.inspection.report import inspect_model
from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import write_fp8_checkpoint
from srt.test.fp8_formats import FORMATS
from srt.test.tiny_llama import write_checkpoint
from srt.test.tiny_models import ARCHITECTURES
from srt.test.tiny_models import make_tensors as make_model_tensors
from srt.test.tiny_tokenizer import write_tokenizer

register_cpu_ci(est_time=40, suite="per-commit")

# Far above what the slowest takes on a busy machine.
MAX_SECONDS = 20.0
MODELS = (
    ("bf16", "llama"),
    ("autofp8-static", "llama"),
    ("deepseek-small-blocks", "qwen3"),
    ("compressed-tensors-dynamic", "mistral"),
    ("modelopt", "qwen2"),
    ("mistral-own", "mistral"),
    ("mistral-hf", "ministral3"),
    ("fbgemm", "llama"),
    ("bf16", "deepseek-v3"),
)
ACTIONS = ("value",) * 6 + ("remove", "rename", "wrap", "similar")
VALUES: tuple[Any, ...] = (
    None, True, False, 0, 1, -1, 2, 3, 7, 1e6, 10**6, 2**31, 2**63, 10**30, 10**9, 0.5, -0.0,
    1e300, 1e-300, float("nan"), float("inf"), "", "a", "fp8", "silu", "default",
    "yarn", "llama3", "linear", "re:(", "../x", "\ud800", "x" * 3000,
    [], [None], [0], [1, 2], [-1], ["a"], [[]], [{}], {},
    {"a": 1}, {"a": {}}, {"rope_type": "yarn"}, {"type": "linear"}, [1] * 1000,
    {"0": "a"}, {"content": 1},
)  # fmt: skip


@cache
def _sources(root: Path) -> list[Path]:
    """The sound checkpoints, written once."""
    directories = []
    for i, (fmt, architecture) in enumerate(MODELS):
        directory = root / f"source-{i}"
        config = dict(ARCHITECTURES[architecture])
        if fmt == "bf16":
            write_checkpoint(directory, config, make_model_tensors(config))
        else:
            write_fp8_checkpoint(FORMATS[fmt], directory, config, make_model_tensors(config))
        write_tokenizer(directory)
        (directory / "generation_config.json").write_text(
            json.dumps({"eos_token_id": [2], "temperature": 0.7, "top_p": 0.9, "top_k": 20})
        )
        (directory / "special_tokens_map.json").write_text(
            json.dumps({"bos_token": {"content": "<s>", "lstrip": False}, "eos_token": "</s>"})
        )
        directories.append(directory)
    return directories


def _places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Paths of all values of some JSON; of a long list or object, the first few."""
    if path:
        yield path
    if isinstance(value, dict):
        for key in list(value)[:40]:
            yield from _places(value[key], (*path, key))
    elif isinstance(value, list):
        for i in range(min(3, len(value))):
            yield from _places(value[i], (*path, i))


def _mutate_json(content: dict[str, Any], rng: random.Random) -> str:
    """One to three values replaced, removed, renamed, nested or repeated; a description."""
    done = []
    for _ in range(rng.choice((1, 1, 1, 2, 3))):
        places = list(_places(content))
        if not places:
            break
        path = rng.choice(places)
        holder: Any = content
        for key in path[:-1]:
            holder = holder[key]
        last, action = path[-1], rng.choice(ACTIONS)
        if action == "remove":
            del holder[last]
        elif action == "rename" and isinstance(holder, dict):
            holder[f"{last}x"] = holder.pop(last)
        elif action == "wrap":
            holder[last] = rng.choice(([holder[last]], {"a": holder[last]}, str(holder[last])))
        elif action == "similar" and isinstance(holder[last], (int, float)):
            holder[last] = holder[last] * rng.choice((2, -1, 0.5, 10, 1.5)) + rng.choice((0, 1))
        else:
            holder[last] = copy.deepcopy(rng.choice(VALUES))
        done.append(f"{action} {'.'.join(map(str, path))}")
    return "; ".join(done)


def _mutate_bytes(content: bytes, rng: random.Random) -> tuple[bytes, str]:
    at = rng.randrange(len(content))
    kind = rng.choice(("flip", "cut", "insert", "deep", "empty", "bom"))
    if kind == "flip":
        return content[:at] + bytes([content[at] ^ 1 << rng.randrange(8)]) + content[at + 1 :], kind
    if kind == "cut":
        return content[:at], kind
    if kind == "insert":
        return content[:at] + rng.choice((b"\0", b'"', b"{", b",", b"\xff")) + content[at:], kind
    if kind == "deep":
        return b'{"a":' * 100_000 + b"1" + b"}" * 100_000, kind
    return (b"" if kind == "empty" else b"\xef\xbb\xbf" + content), kind


def _mutate_file(file: Path, rng: random.Random) -> str:
    if file.suffix == ".safetensors":
        data = file.read_bytes()
        size = int.from_bytes(data[:8], "little")
        header = json.loads(data[8 : 8 + size])
        described = _mutate_json(header, rng)
        new = json.dumps(header).encode()
        file.write_bytes(len(new).to_bytes(8, "little") + new + data[8 + size :])
        return described
    content = file.read_bytes()
    if rng.random() < 0.2 or file.suffix != ".json":
        content, described = _mutate_bytes(content, rng)
        file.write_bytes(content)
        return described
    value = json.loads(content)
    described = _mutate_json(value, rng)
    file.write_text(json.dumps(value))
    return described


def mutate(root: Path, number: int) -> tuple[Path, str]:
    """The checkpoint of this number, and what is wrong with it."""
    rng = random.Random(number)
    source = rng.choice(_sources(root))
    target = root / f"mutant-{number}"
    shutil.copytree(source, target)
    files = sorted(file for file in target.iterdir() if file.is_file())
    # Weights are one file among many, the configuration is what most can go wrong with.
    weights = [4 if file.name in ("config.json", "params.json") else 1 for file in files]
    file = rng.choices(files, weights)[0]
    return target, f"{file.name}: {_mutate_file(file, rng)}"


# What the bytes of tensors tell, and inspection cannot know.
ONLY_LOADING_TELLS = ("not a positive finite number", "holds NaN", "not finite")


def inspect(directory: Path) -> list[str] | None:
    """What speaks against running it; None if that cannot be said of it."""
    try:
        return inspect_model(directory).problems
    except SrtError:
        return None


def check_inspection(problems: list[str] | None, error: str | None) -> None:
    """Whether starting with `error`, or without one, is what inspection says."""
    if error is None:
        assert problems == [], f"it runs, inspection says: {problems}"
    elif problems is not None and not any(part in error for part in ONLY_LOADING_TELLS):
        # Of several faults inspection tells more.
        assert error in problems, f"starting says: {error}; inspection: {problems}"


def run(directory: Path) -> str:
    """Inspects, starts and generates; returns what came of it."""
    problems = inspect(directory)
    started = False
    try:
        with Engine(directory, max_total_tokens=128, num_threads=1, progress=False) as engine:
            started = True
            check_inspection(problems, None)
            params = SamplingParams(max_new_tokens=2, temperature=0.0)
            engine.generate(input_ids=[1, 5, 7], sampling_params=params)
            if engine.tokenizer is not None:
                with contextlib.suppress(SrtError):
                    engine.generate("hé", params)
                with contextlib.suppress(SrtError):
                    engine.generate(
                        messages=[{"role": "user", "content": "a"}], sampling_params=params
                    )
    except SrtError as error:
        text = str(error)
        assert text and "\n" not in text and len(text) < 2100, text
        if not started:
            check_inspection(problems, text)
        return "refused"
    return "runs"


def try_all(root: Path, numbers: range) -> None:
    threads = torch.get_num_threads()
    problems, counts = [], {"runs": 0, "refused": 0}
    logging.disable(logging.WARNING)
    try:
        for number in numbers:
            directory, described = mutate(root, number)
            started = time.monotonic()
            try:
                counts[run(directory)] += 1
            except BaseException as error:
                if isinstance(error, KeyboardInterrupt):
                    raise
                problems.append(f"{number} {described}: {type(error).__name__}: {error}"[:400])
            if (seconds := time.monotonic() - started) > MAX_SECONDS:
                problems.append(f"{number} {described}: {seconds:.0f} s")
            shutil.rmtree(directory)
    finally:
        logging.disable(logging.NOTSET)
        torch.set_num_threads(threads)
    assert not problems, f"{len(problems)} of {len(numbers)}:\n" + "\n".join(problems)
    # The mutations are neither all harmless nor all fatal.
    assert min(counts.values()) > len(numbers) / 10, counts


def test_two_hundred(tmp_path: Path) -> None:
    try_all(tmp_path, range(200))


@pytest.mark.slow
def test_two_thousand(tmp_path: Path) -> None:
    try_all(tmp_path, range(200, 2200))
