"""docs/json.md names every key that `--json` prints, and no other."""

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from srt.cli.main import main
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

register_cpu_ci(est_time=8, suite="per-commit")

ROOT = Path(__file__).parents[3]
# What this machine, or a sound one, does not show.
SELDOM = {"kernels.problem", "torch.problem"}


def documented(section: str) -> set[str]:
    page = (ROOT / "docs" / "json.md").read_text()
    text = re.search(rf"^## {re.escape(section)}\n(.*?)(?=^## |\Z)", page, re.M | re.S)
    assert text is not None
    cells = re.findall(r"^\| (`.*?`) \|", text[1], re.M)
    return {key for cell in cells for key in re.findall(r"`([^`]+)`", cell)}


def keys_of(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield prefix + key
            yield from keys_of(inner, f"{prefix}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, f"{prefix.removesuffix('.')}[].")


def check(section: str, printed: Any) -> None:
    keys, pages = set(keys_of(printed)), documented(section)
    opens = tuple(key.removesuffix("*") for key in pages if key.endswith(".*"))
    assert {key for key in keys - pages if not key.startswith(opens or ("\0",))} == set()
    assert {key for key in pages - keys if not key.endswith(".*")} - SELDOM == set()


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """FP8 (with a tensor that is not used), bf16, and a text."""
    directory = tmp_path_factory.mktemp("keys")
    config = TINY_CONFIG | {"vocab_size": VOCAB_SIZE}
    tensors = make_tensors(config)
    fp8 = quantize(tensors)
    fp8 |= {
        name.replace("weight_scale", "input_scale"): torch.ones(())
        for name in fp8
        if name.endswith("weight_scale")
    }
    write_checkpoint(directory / "fp8", config, fp8, {"quant_method": "fp8"})
    write_checkpoint(directory / "bf16", config, tensors)
    for name in ("fp8", "bf16"):
        write_tokenizer(directory / name)
    (directory / "text").write_text("hello " * 8)
    return directory


@pytest.mark.parametrize(
    ("command", "arguments"),
    [
        (
            "generate",
            "--model fp8 --prompt a --max-new-tokens 3 --ignore-eos --logprobs --top-logprobs 1 "
            "--prompt-logprobs",
        ),
        ("inspect", "fp8"),
        ("quantize", "bf16 quantized"),
        ("perplexity", "--model fp8 --text text --window 16"),
        ("bench", "--model fp8 --input-len 4 --output-len 2 --repetitions 1"),
        ("env", ""),
    ],
)
def test_commands(
    models: Path,
    command: str,
    arguments: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.chdir(models)
    assert main([command, *arguments.split(), "--json"]) == 0
    check(f"srt {command}", json.loads(capsys.readouterr().out))


@pytest.mark.slow
def test_the_benchmark_of_the_kernels(tmp_path: Path) -> None:
    options = "--shapes smollm2-135m --m 1 --rounds 1 --seconds 0.005 --rotate-mib 1 --no-peers"
    program = ROOT / "sgl-kernel-cpu" / "benchmark" / "bench_gemm.py"
    command = [sys.executable, str(program), *options.split(), "--threads", "2"]
    subprocess.run(
        [*command, "--isa", "scalar", "--json", str(tmp_path / "a.json")],
        check=True,
        capture_output=True,
    )
    check("The kernels' benchmark", json.loads((tmp_path / "a.json").read_text()))


def test_a_key_too_many_or_too_few_is_noticed() -> None:
    facts = dict.fromkeys(documented("srt perplexity"), 1)
    check("srt perplexity", facts)
    with pytest.raises(AssertionError):
        check("srt perplexity", facts | {"new": 1})
    with pytest.raises(AssertionError):
        check("srt perplexity", {key: 1 for key in facts if key != "nll"})
