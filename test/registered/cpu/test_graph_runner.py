"""Compiled decode: every operator can be traced, nothing is compiled after capture, and the logits
stay.
"""

import pytest
import torch
from packaging.version import Version
from torch import Tensor
from torch._dynamo.utils import counters

from srt.configs.model_config import ModelConfig
from srt.errors import SrtError
from srt.model_executor.cpu_graph_runner import (
    MIN_TORCH,
    default_batch_sizes,
    operators_without_fake,
    register_fake_ops,
)
from srt.test.ci_register import register_cpu_ci
from srt.test.contiguous_runner import ContiguousRunner, DecodeInput, ExtendInput
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_text_model import FP8

register_cpu_ci(est_time=40, suite="per-commit")

BATCH_SIZES = (1, 4)
CACHE_SIZE = 128


@pytest.fixture(scope="module")
def runners(tmp_path_factory: pytest.TempPathFactory) -> tuple[ContiguousRunner, ContiguousRunner]:
    """The same tied FP8 checkpoint without and with compiled decode."""
    if Version(Version(torch.__version__).base_version) < Version(MIN_TORCH):
        pytest.skip(f"graph mode needs Torch {MIN_TORCH}")
    counters.clear()
    config = TINY_CONFIG | {"tie_word_embeddings": True}
    path = write_checkpoint(
        tmp_path_factory.mktemp("graph"),
        config,
        quantize(make_tensors(config)),
        FP8,
    )
    model_config = ModelConfig.from_pretrained(path)
    eager = ContiguousRunner(model_config, max_total_tokens=CACHE_SIZE, disable_graph=True)
    graph = ContiguousRunner(
        model_config,
        max_total_tokens=CACHE_SIZE,
        enable_torch_compile=True,
        compiled_batch_sizes=BATCH_SIZES,
        progress=False,
    )
    return eager, graph


def decode_logits(runner: ContiguousRunner, lengths: list[int], steps: int) -> list[Tensor]:
    """Logits of `steps` decode steps of requests with prompts of these lengths."""
    starts = [1 + 30 * i for i in range(len(lengths))]
    prompts = [
        [(7 * i + start) % 1000 for i in range(n)] for n, start in zip(lengths, starts, strict=True)
    ]
    runner.extend([ExtendInput(p, 0, s) for p, s in zip(prompts, starts, strict=True)])
    return [
        runner.decode(
            [DecodeInput(11 * i + 3, n + i, s) for n, s in zip(lengths, starts, strict=True)]
        )
        for i in range(steps)
    ]


@pytest.mark.parametrize("lengths", [[5], [9, 2], [1, 7, 4], [3, 3, 8, 20]])
def test_graph_and_eager_logits_agree(
    runners: tuple[ContiguousRunner, ContiguousRunner], lengths: list[int]
) -> None:
    eager, graph = (decode_logits(runner, lengths, steps=4) for runner in runners)
    for expected, logits in zip(eager, graph, strict=True):
        assert logits.shape == (len(lengths), TINY_CONFIG["vocab_size"])
        assert torch.equal(logits, expected)


def test_nothing_is_compiled_after_capture(
    runners: tuple[ContiguousRunner, ContiguousRunner],
) -> None:
    for lengths in ([4], [17], [2, 3], [1, 2, 3], [9, 8, 7, 6]):
        decode_logits(runners[1], lengths, steps=5)
    # Counted since before the capture; the tests above have decoded too.
    assert counters["stats"]["unique_graphs"] == len(BATCH_SIZES)


def test_a_second_start_reuses_what_was_compiled(
    runners: tuple[ContiguousRunner, ContiguousRunner],
) -> None:
    graph_runner = runners[1].runner.graph_runner
    assert graph_runner is not None
    torch._dynamo.reset()
    before = counters["aot_autograd"]["autograd_cache_hit"]
    graph_runner.capture(progress=False)
    assert counters["aot_autograd"]["autograd_cache_hit"] == before + len(BATCH_SIZES)


def test_a_batch_beyond_the_captured_sizes_runs_eagerly(
    runners: tuple[ContiguousRunner, ContiguousRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    eager, graph = runners

    def fail(*_: object) -> None:
        raise AssertionError("replayed")

    assert graph.runner.graph_runner is not None
    monkeypatch.setattr(graph.runner.graph_runner, "replay", fail)
    inputs = [DecodeInput(5, 0, start) for start in range(1, 6)]
    torch.testing.assert_close(graph.decode(inputs), eager.decode(inputs))


def test_padding_leaves_the_cache_of_others_alone(
    runners: tuple[ContiguousRunner, ContiguousRunner],
) -> None:
    graph = runners[1]
    keys, values = graph.runner.kv_pool.get_kv_buffer(0)
    assert values is not None
    keys.fill_(7)
    values.fill_(7)
    graph.decode([DecodeInput(5, 0, start) for start in (10, 20, 30)])
    written = {int(slot) for slot in (keys != 7).flatten(1).any(1).nonzero()}
    assert written == {0, 10, 20, 30}


def test_an_old_torch_is_refused(
    runners: tuple[ContiguousRunner, ContiguousRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    graph_runner = runners[1].runner.graph_runner
    assert graph_runner is not None
    monkeypatch.setattr(torch, "__version__", "2.10.0+cpu")
    with pytest.raises(SrtError, match=r"needs Torch 2\.13 or later, found 2\.10\.0\+cpu"):
        graph_runner.capture(progress=False)


def test_every_operator_has_a_fake_kernel() -> None:
    register_fake_ops()
    register_fake_ops()
    assert operators_without_fake("sgl_kernel") == []
    assert operators_without_fake("srt") == []


def test_an_operator_without_fake_is_found_and_named(
    runners: tuple[ContiguousRunner, ContiguousRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    with torch.library._scoped_library("srt_test_graph", "FRAGMENT") as library:
        library.define("no_fake(Tensor x) -> Tensor")
        library.define("with_fake(Tensor x) -> Tensor")
        library.impl("no_fake", lambda x: x.clone(), "CPU")
        torch.library.register_fake("srt_test_graph::with_fake", torch.empty_like, lib=library)
        assert operators_without_fake("srt_test_graph") == ["srt_test_graph::no_fake"]
    monkeypatch.setattr(
        "srt.model_executor.cpu_graph_runner.operators_without_fake", lambda _: ["sgl_kernel::odd"]
    )
    assert runners[1].runner.graph_runner is not None
    with pytest.raises(SrtError, match="fake kernel of sgl_kernel::odd"):
        runners[1].runner.graph_runner.capture(progress=False)


@pytest.mark.parametrize(
    ("limit", "sizes"), [(1, (1,)), (2, (1, 2)), (6, (1, 2, 4, 6)), (32, (1, 2, 4, 8, 16, 32))]
)
def test_default_batch_sizes(limit: int, sizes: tuple[int, ...]) -> None:
    assert default_batch_sizes(limit) == sizes
