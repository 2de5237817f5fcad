"""`srt perplexity` against the definition: a pass of transformers' model for each scored token."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srt.cli.main import main
from srt.configs.engine_config import EngineConfig
from srt.configs.model_config import ModelConfig
from srt.errors import RequestError
from srt.managers.tokenizer import encode, load_tokenizer
from srt.model_executor.model_runner import ModelRunner
from srt.perplexity.sliding_window import compute_perplexity
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import reference_model
from srt.test.tiny_text_model import TEXT_CONFIG, write_text_model
from srt.test.tiny_tokenizer import VOCAB_SIZE

register_cpu_ci(est_time=10, suite="per-commit")

CONFIG = TEXT_CONFIG | {"max_position_embeddings": 640}
TEXT = "It is a truth universally acknowledged, that a single man in possession of a good fortune"


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("perplexity")
    return write_text_model(path, CONFIG)


@pytest.fixture(scope="module")
def runner(checkpoint: Path) -> ModelRunner:
    config = ModelConfig.from_pretrained(checkpoint, "float32")
    return ModelRunner(
        config,
        EngineConfig(checkpoint, max_running_requests=1, max_total_tokens=600, progress=False),
    )


def make_ids(count: int) -> list[int]:
    generator = torch.Generator().manual_seed(count)
    ids: list[int] = torch.randint(3, VOCAB_SIZE, (count,), generator=generator).tolist()
    return ids


def expected_nll(model: Any, ids: list[int], window: int, stride: int) -> float:
    """Each token by itself, after the context that the first window reaching it gives."""
    total = 0.0
    for target in range(1, len(ids)):
        number = max(0, math.ceil((target + 1 - window) / stride))
        context = ids[number * stride : target]
        with torch.inference_mode():
            logits: Tensor = model(torch.tensor([context])).logits[0, -1]
        total -= float(logits.double().log_softmax(-1)[ids[target]])
    return total


@pytest.mark.parametrize(
    ("count", "window", "stride"),
    [
        (40, 16, 8),
        (40, 16, 15),
        (40, 16, 1),
        (41, 16, 5),
        (17, 16, 8),
        (16, 16, 8),
        (9, 16, 8),
        (2, 2, 1),
        (6, 2, 1),
    ],
)
def test_against_single_passes_of_transformers(
    checkpoint: Path, runner: ModelRunner, count: int, window: int, stride: int
) -> None:
    ids = make_ids(count)
    scored: list[int] = []
    result = compute_perplexity(runner, ids, window, stride, scored.append)
    expected = expected_nll(reference_model(checkpoint), ids, window, stride)
    assert result.scored == sum(scored) == count - 1
    assert result.nll == pytest.approx(expected, rel=1e-5)
    assert result.perplexity == pytest.approx(math.exp(expected / (count - 1)), rel=1e-5)


def test_windows_longer_than_a_pass(checkpoint: Path, runner: ModelRunner) -> None:
    ids = make_ids(900)
    model = reference_model(checkpoint)
    with torch.inference_mode():
        first, second = (
            model(torch.tensor([part])).logits[0].double().log_softmax(-1)
            for part in (ids[:600], ids[450:900])
        )
    # The first window scores tokens 1 to 599, the second 600 to 899.
    expected = -sum(float(first[i, ids[i + 1]]) for i in range(599))
    expected -= sum(float(second[i - 450, ids[i + 1]]) for i in range(599, 899))
    result = compute_perplexity(runner, ids, 600, 450)
    assert result.nll == pytest.approx(expected, rel=1e-5)


def test_the_cache_is_free_afterwards(runner: ModelRunner) -> None:
    free = runner.allocator.available_size, runner.req_to_token_pool.available_size
    first = compute_perplexity(runner, make_ids(50), 16, 8)
    assert (runner.allocator.available_size, runner.req_to_token_pool.available_size) == free
    assert compute_perplexity(runner, make_ids(50), 16, 8) == first


@pytest.mark.parametrize(
    ("count", "window", "stride", "message"),
    [
        (1, 16, 8, "needs 2 tokens at least, found 1"),
        (9, 1, 1, "window 1: expected 2 to 600"),
        (9, 601, 1, "window 601: expected 2 to 600"),
        (9, 16, 0, "stride 0: expected 1 to 15"),
        (9, 16, 16, "stride 16: expected 1 to 15"),
    ],
)
def test_bad_arguments(
    runner: ModelRunner, count: int, window: int, stride: int, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        compute_perplexity(runner, make_ids(count), window, stride)


def test_command_line(checkpoint: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "text"
    file.write_text(TEXT)
    argv = ["perplexity", "--model", str(checkpoint), "--text", str(file), "--window", "32"]
    assert main([*argv, "--dtype", "float32", "--tokens", "50", "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    ids = encode(load_tokenizer(checkpoint), TEXT)[:50]
    assert facts["nll"] == pytest.approx(
        expected_nll(reference_model(checkpoint), ids, 32, 16), rel=1e-5
    )
    assert facts["tokens"] == 50
    assert facts["scored_tokens"] == 49
    assert (facts["window"], facts["stride"]) == (32, 16)
    assert facts["perplexity"] == pytest.approx(math.exp(facts["nll"] / 49))
    assert main([*argv, "--stride", "4"]) == 0
    out = capsys.readouterr().out
    assert out.startswith("perplexity ")
    assert f"of {len(TEXT)} tokens, window 32, stride 4" in out


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (["--text", "/nonexistent"], "cannot read the text"),
        (["--text", "TEXT", "--tokens", "1"], "--tokens 1: expected 2 at least"),
        (["--text", "TEXT", "--window", "4096"], "window 4096: expected 2 to 640"),
        (["--text", "TEXT", "--window", "1"], "window 1: expected 2"),
        (["--text", "TEXT", "--window", "8", "--stride", "8"], "stride 8: expected 1 to 7"),
    ],
)
def test_command_line_errors(
    checkpoint: Path,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    options: list[str],
    message: str,
) -> None:
    file = tmp_path / "text"
    file.write_text(TEXT)
    argv = [str(file) if option == "TEXT" else option for option in options]
    assert main(["perplexity", "--model", str(checkpoint), *argv]) == 2
    assert message in capsys.readouterr().err
