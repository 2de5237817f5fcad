"""`srt bench`: what it measures, with peers that are found or not."""

import json
import stat
from pathlib import Path
from typing import Any

import pytest
from transformers import LlamaConfig, LlamaForCausalLM

from srt import Engine
from srt.bench.bound import decode_bound, decode_bytes, read_bandwidth
from srt.bench.report import make_figure, plot
from srt.bench.workload import Case, Contender, Measurement, OurEngine, measure, random_prompts
from srt.cli.main import main
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_text_model import FP8

register_cpu_ci(est_time=12, suite="per-commit")


@pytest.fixture(scope="module")
def path(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    return write_checkpoint(directory, TINY_CONFIG, quantize(make_tensors(TINY_CONFIG)), FP8)


def bench(path: Path, *options: str) -> int:
    common = ["--max-total-tokens", "256", "--quiet", "--input-len", "8", "--output-len", "4"]
    return main(["bench", "--model", str(path), "--repetitions", "2", *common, *options])


def test_a_table(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(path) == 0
    out = capsys.readouterr().out
    assert "medians of 2 interleaved runs" in out
    assert "of bound" in out
    assert "srt tiny" in out


def test_json(path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert bench(path, "--json", "--batch-size", "1", "3") == 0
    result = json.loads(capsys.readouterr().out)
    assert [(r["batch"], r["input_len"], r["output_len"]) for r in result["results"]] == [
        (1, 8, 4),
        (3, 8, 4),
    ]
    for row in result["results"]:
        assert len(row["prefill_runs"]) == len(row["decode_runs"]) == 2
        low, high = row["decode_range"]
        assert 0 < low <= row["decode_tokens_per_second"] <= high
        assert row["decode_bound"] > 0
    assert result["read_bandwidth"] > 1e8


def test_llama_bench_runs_in_turn(
    path: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    program = tmp_path / "llama-bench"
    program.write_text(
        f'#!/bin/sh\necho "$@" >> {tmp_path}/calls\n'
        "case \"$*\" in *'-n 0'*) s=100;; *) s=10;; esac\n"
        'echo "[{\\"avg_ts\\": $s}]"\n'
    )
    program.chmod(program.stat().st_mode | stat.S_IXUSR)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=":")
    gguf = tmp_path / "model.Q8_0.gguf"
    gguf.touch()
    assert bench(path, "--json", "--gguf", str(gguf), "--batch-size", "1", "2") == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [(row["contender"], row["batch"]) for row in rows] == [
        ("srt tiny", 1),
        ("llama.cpp Q8_0", 1),
        ("srt tiny", 2),
    ]
    assert rows[1]["prefill_runs"] == [100, 100]
    assert rows[1]["decode_runs"] == [10, 10]
    calls = (tmp_path / "calls").read_text().splitlines()
    assert len(calls) == 6
    assert calls[1].endswith("-r 1 -o json -p 0 -n 4 -d 8")
    program.write_text("#!/bin/sh\necho no such model >&2\nexit 3\n")
    assert bench(path, "--gguf", str(gguf)) == 2
    assert "llama-bench failed with status 3: no such model" in capsys.readouterr().err


def test_transformers_as_a_peer(
    path: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    LlamaForCausalLM(LlamaConfig(**TINY_CONFIG)).save_pretrained(tmp_path)
    options = ["--transformers", str(tmp_path), "--transformers-dtype", "bfloat16", "float32"]
    assert bench(path, "--json", *options) == 0
    rows = json.loads(capsys.readouterr().out)["results"]
    assert [row["contender"] for row in rows] == [
        "srt tiny",
        "transformers bfloat16",
        "transformers float32",
    ]
    assert all(row["decode_tokens_per_second"] > 0 for row in rows)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--output-len", "1"], "--output-len >= 2"),
        (["--batch-size", "0"], "batch sizes and repetitions >= 1"),
        (["--gguf", "x.gguf"], "--gguf needs llama-bench on PATH; found none"),
        (["--transformers", "nowhere"], "transformers cannot load nowhere"),
    ],
)
def test_what_cannot_run_is_said(
    path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    options: list[str],
    message: str,
) -> None:
    monkeypatch.setenv("PATH", "")
    assert bench(path, *options) == 2
    assert message in capsys.readouterr().err


class Counter(Contender):
    """Returns how many runs there have been of all."""

    calls = 0

    def __init__(self, name: str) -> None:
        self.name = name

    def run(self, case: Case) -> Measurement:
        Counter.calls += 1
        return Measurement(Counter.calls, case.batch)


def test_repetitions_are_interleaved_and_the_first_does_not_count() -> None:
    Counter.calls = 0
    first, second = measure([Counter("a"), Counter("b")], [Case(1, 8, 2)], 3)
    assert [run.prefill for run in first.runs] == [3, 5, 7]
    assert [run.prefill for run in second.runs] == [4, 6, 8]
    assert first.to_dict()["prefill_tokens_per_second"] == 5


@pytest.mark.parametrize("tied", [False, True])
def test_bytes_of_a_token(tmp_path: Path, tied: bool) -> None:
    config = TINY_CONFIG | {"tie_word_embeddings": tied}
    write_checkpoint(tmp_path, config, quantize(make_tensors(config)), FP8)
    hidden, inner, vocab = (config[k] for k in ("hidden_size", "intermediate_size", "vocab_size"))
    linear = hidden * (hidden + 2 * 32) + hidden * hidden + 3 * hidden * inner  # 1 byte each
    norms = 4 * hidden * 5
    sizes = []
    for quantized in (False, True):
        with Engine(
            tmp_path, max_total_tokens=64, quantize_lm_head=quantized, progress=False
        ) as engine:
            sizes.append(decode_bytes(engine.model_runner.model))
    scales = 2 * 4 * 4  # one for each of four products, where shards agree
    for size, head in zip(sizes, (2 * vocab * hidden, vocab * (hidden + 4)), strict=True):
        expected = 2 * linear + norms + head
        assert expected + scales <= size <= expected + 4 * 2 * (hidden * 3 + 2 * inner)


def test_the_bound() -> None:
    assert decode_bound(1000.0, 100, 0, Case(1, 10, 10)) == 10
    assert decode_bound(1000.0, 100, 0, Case(4, 10, 10)) == 40
    # Two requests of 10 + 5 tokens on average read 2 * 15 * 5 bytes beside the weights.
    assert decode_bound(1000.0, 100, 5, Case(2, 10, 10)) == 2 * 1000 / 250
    assert read_bandwidth(1) > 1e8


def test_prompts_repeat() -> None:
    prompts = random_prompts(Case(3, 5, 2), 50)
    assert prompts == random_prompts(Case(3, 5, 2), 50)
    assert [len(prompt) for prompt in prompts] == [5, 5, 5]


def test_our_engine_counts_the_tokens_after_the_last_first_one(path: Path) -> None:
    with Engine(path, max_total_tokens=256, progress=False, enable_radix_cache=False) as engine:
        run = OurEngine(engine, "srt").run(Case(2, 20, 5))
    assert run.prefill > 0
    assert run.decode > 0


def test_plot(tmp_path: Path) -> None:
    """Machine and tier are in its title; bound, spread and contenders in its legend."""
    pytest.importorskip("matplotlib")
    row: dict[str, Any] = {
        "contender": "srt",
        "batch": 1,
        "input_len": 8,
        "output_len": 4,
        "prefill_tokens_per_second": 10.0,
        "decode_tokens_per_second": 5.0,
        "prefill_range": [9.0, 11.0],
        "decode_range": [4.0, 6.0],
        "decode_bound": 8.0,
    }
    facts = {"model": "tiny", "cpu_model": "A CPU", "isa_tier": "avx2", "threads": 2}
    peer = {key: value for key, value in row.items() if key != "decode_bound"}
    rows = [row, peer | {"contender": "peer"}]
    plot(facts, rows, tmp_path / "speed.png")
    assert (tmp_path / "speed.png").read_bytes().startswith(b"\x89PNG")
    figure = make_figure(facts, rows)
    assert figure.get_suptitle() == "tiny on A CPU, tier avx2, 2 threads"
    assert [text.get_text() for text in figure.legends[0].get_texts()] == [
        "srt",
        "peer",
        "bound: weights and cache read once a token",
        "lowest to highest run",
    ]
    bars = figure.axes[0].patches
    assert bars[0].get_facecolor() != bars[1].get_facecolor()
