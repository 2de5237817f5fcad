"""Decode by replaying recorded passes: the bits of eager passes, for every decoder."""

import argparse
import logging
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srt import SamplingParams
from srt.cli.options import add_engine_options, make_config, make_engine
from srt.configs.model_config import ModelConfig
from srt.model_executor.step_graph_runner import StepGraphRunner
from srt.test.ci_register import register_cpu_ci
from srt.test.contiguous_runner import ContiguousRunner, DecodeInput, ExtendInput
from srt.test.model_cases import TOKENS, write_model
from srt.test.tiny_models import ARCHITECTURES, make_tensors
from srt.test.tiny_tokenizer import VOCAB_SIZE, write_tokenizer
from srt.utils.signals import Signals

register_cpu_ci(est_time=10, suite="per-commit")

# Format, architecture, options of the runner. Windows slide, and positions pass the original
# length of scaled rotations.
CASES: list[tuple[str, str, dict[str, Any]]] = [
    ("bf16", "llama", {}),
    ("autofp8-kv", "llama", {"kv_cache_dtype": "fp8_e4m3"}),
    ("fbgemm", "llama-tied", {"quantize_lm_head": True}),
    ("compressed-tensors-dynamic", "llama-tied", {}),
    ("autofp8-static", "llama-bias", {"quantize_lm_head": True}),
    ("compressed-tensors-dynamic", "smollm3", {}),
    ("autofp8-static", "mistral", {}),
    ("autofp8-dynamic", "ministral", {}),
    ("mistral-own", "ministral3", {"kv_cache_dtype": "fp8_e4m3"}),
    ("mistral-hf-channel", "mistral3", {}),
    ("autofp8-dynamic", "qwen2", {}),
    ("compressed-tensors-block", "qwen2-window", {}),
    ("deepseek-small-blocks", "qwen3", {}),
]
REQUESTS = 9


def make_runner(path: Path, dtype: str = "float16", **options: Any) -> ContiguousRunner:
    config = ModelConfig.from_pretrained(path, dtype=dtype)
    options = {"max_total_tokens": 600, "progress": False} | options
    return ContiguousRunner(config, **options)


def step_graphs(runner: ContiguousRunner) -> StepGraphRunner:
    assert runner.runner.step_graph_runner is not None
    return runner.runner.step_graph_runner


def decode_logits(runner: ContiguousRunner, sizes: range, steps: int) -> list[Tensor]:
    """Logits of some steps at each batch size, of requests that go on from size to size."""
    lengths = [30 - 3 * i for i in range(REQUESTS)]
    starts = [1 + 60 * i for i in range(REQUESTS)]
    runner.extend([ExtendInput(TOKENS[:n], 0, s) for n, s in zip(lengths, starts, strict=True)])
    logits = []
    for size in sizes:
        for _ in range(steps):
            # Not always the same requests, nor in the same rows.
            rows = [(size + row) % REQUESTS for row in range(size)]
            logits.append(
                runner.decode(
                    [DecodeInput(TOKENS[lengths[r]], lengths[r], starts[r]) for r in rows]
                )
            )
            for row in rows:
                lengths[row] += 1
    return logits


@pytest.mark.parametrize(("fmt", "architecture", "options"), CASES, ids=lambda v: str(v))
def test_replayed_logits_are_the_eager_ones(
    fmt: str, architecture: str, options: dict[str, Any], tmp_path: Path
) -> None:
    config = ARCHITECTURES[architecture]
    write_model(tmp_path, fmt, config, make_tensors(config))
    sizes = range(1, REQUESTS + 1)
    eager = make_runner(tmp_path, disable_graph=True, **options)
    assert eager.runner.step_graph_runner is None
    recorded = make_runner(tmp_path, **options)
    expected = decode_logits(eager, sizes, steps=3)
    assert all(logits.isfinite().all() for logits in expected)
    for got, logits in zip(decode_logits(recorded, sizes, steps=3), expected, strict=True):
        assert torch.equal(got, logits)
    assert step_graphs(recorded).refusal is None
    assert step_graphs(recorded).recorded_sizes == tuple(range(1, REQUESTS + 1))


@pytest.mark.parametrize(
    ("architecture", "dtype"),
    [("deepseek-v2", "float16"), ("deepseek-v3", "bfloat16"), ("llama-tied", "float32")],
)
def test_what_cannot_be_recorded_runs_eagerly_and_says_so_once(
    architecture: str, dtype: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    config = ARCHITECTURES[architecture]
    write_model(tmp_path, "bf16", config, make_tensors(config))
    eager = decode_logits(make_runner(tmp_path, dtype, disable_graph=True), range(1, 4), steps=2)
    runner = make_runner(tmp_path, dtype)
    with caplog.at_level(logging.INFO, "srt.model_executor.step_graph_runner"):
        for got, logits in zip(decode_logits(runner, range(1, 4), steps=2), eager, strict=True):
            assert torch.equal(got, logits)
    assert step_graphs(runner).recorded_sizes == ()
    reason = step_graphs(runner).refusal
    assert reason is not None and reason.endswith("cannot be recorded")
    assert caplog.messages == [f"decode passes of this model run one by one: {reason}"]


def test_lengths_beyond_the_request_are_refused_and_the_graph_goes_on(tmp_path: Path) -> None:
    config = ARCHITECTURES["llama"]
    write_model(tmp_path, "autofp8-static", config, make_tensors(config))
    runner = make_runner(tmp_path)
    runner.extend([ExtendInput(TOKENS[:5], 0, 1)])
    first = runner.decode([DecodeInput(3, 5, 1)])
    with pytest.raises(RuntimeError, match="packed_embedding_cpu: indices: expected indices in"):
        runner.decode([DecodeInput(config["vocab_size"], 5, 1)])
    assert torch.equal(runner.decode([DecodeInput(3, 5, 1)]), first)
    assert step_graphs(runner).recorded_sizes == (1,)


def test_the_engine_records_unless_told_not_to(tmp_path: Path) -> None:
    config = {**ARCHITECTURES["llama"], "vocab_size": VOCAB_SIZE}
    write_model(tmp_path, "autofp8-static", config, make_tensors(config))
    write_tokenizer(tmp_path)
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    parser.set_defaults(sampling_defaults="greedy", signals=Signals())
    prompts = [[5 + i, 9, 40 + i] for i in range(10)]
    # Requests end one by one: batches of 10 to 1, each at least twice.
    params = [
        SamplingParams(temperature=0, max_new_tokens=3 + 2 * i, ignore_eos=True) for i in range(10)
    ]
    tokens, recorded = [], []
    for options in ([], ["--disable-graph"]):
        args = parser.parse_args(["--model", str(tmp_path), "--max-total-tokens", "200", *options])
        with make_engine(args, make_config(args, max_running_requests=10)) as engine:
            outputs = engine.generate(input_ids=prompts, sampling_params=params)
            tokens.append([output.token_ids for output in outputs])
            assert engine._runner is not None
            runner = engine._runner.step_graph_runner
            recorded.append(runner and runner.recorded_sizes)
    assert tokens[0] == tokens[1]
    assert recorded == [tuple(range(1, 11)), None]
