"""What an engine's methods return is known to type checkers; `make lint` reads this file, too."""

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
from numpy.typing import NDArray
from typing_extensions import assert_type

from srt import Engine, SamplingParams
from srt.entrypoints.chunk_stream import ChunkStream
from srt.entrypoints.outputs import GenerateChunk, GenerateOutput
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

register_cpu_ci(est_time=5, suite="per-commit")

PARAMS = SamplingParams(temperature=0, max_new_tokens=2)
ASK = [{"role": "user", "content": "a"}]


@pytest.fixture(scope="module")
def engine(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Engine]:
    path: Path = tmp_path_factory.mktemp("types")
    config = TINY_CONFIG | {"vocab_size": VOCAB_SIZE}
    write_checkpoint(path, config, quantize(make_tensors(config)), {"quant_method": "fp8"})
    write_tokenizer(path)
    with Engine(path, max_total_tokens=64, progress=False) as made:
        yield made


def test_one_input(engine: Engine) -> None:
    for output in (
        assert_type(engine.generate("a", PARAMS), GenerateOutput),
        assert_type(engine.generate(messages=ASK, sampling_params=PARAMS), GenerateOutput),
        assert_type(engine.generate(input_ids=[5, 6], sampling_params=PARAMS), GenerateOutput),
        assert_type(engine.generate("a", {"max_new_tokens": 2}, stream=False), GenerateOutput),
    ):
        assert isinstance(output, GenerateOutput)


def test_several_inputs(engine: Engine) -> None:
    ids: list[NDArray[np.int64]] = [np.array([5, 6]), np.array([7])]
    for outputs in (
        assert_type(engine.generate(["a", "b"], PARAMS), list[GenerateOutput]),
        assert_type(engine.generate(("a", "b"), [PARAMS, PARAMS]), list[GenerateOutput]),
        assert_type(
            engine.generate(messages=[ASK, ASK], sampling_params=PARAMS), list[GenerateOutput]
        ),
        assert_type(
            engine.generate(input_ids=[[5], [6]], sampling_params=PARAMS), list[GenerateOutput]
        ),
        assert_type(engine.generate(input_ids=ids, sampling_params=PARAMS), list[GenerateOutput]),
    ):
        assert isinstance(outputs, list)
        assert [type(output) for output in outputs] == [GenerateOutput] * 2


def test_streams(engine: Engine) -> None:
    for stream in (
        assert_type(engine.generate("a", PARAMS, stream=True), ChunkStream),
        assert_type(engine.generate(["a", "b"], PARAMS, stream=True), ChunkStream),
        assert_type(
            engine.generate(input_ids=[5], sampling_params=PARAMS, stream=True), ChunkStream
        ),
    ):
        assert isinstance(stream, ChunkStream)
        assert isinstance(assert_type(next(stream), GenerateChunk), GenerateChunk)
        stream.close()


def test_forms_that_say_it_only_when_they_run(engine: Engine) -> None:
    either = engine.generate(input_ids=np.array([5, 6]), sampling_params=PARAMS)
    assert_type(either, GenerateOutput | list[GenerateOutput] | ChunkStream)
    assert isinstance(either, GenerateOutput)
    asked = bool(engine.config.progress)
    assert_type(
        engine.generate("a", PARAMS, stream=asked),
        GenerateOutput | list[GenerateOutput] | ChunkStream,
    )


def test_options_are_checked_by_name_and_type() -> None:
    """Each of these lines would be an error without its comment."""
    with pytest.raises(TypeError):
        Engine("m", max_total_token=4)  # type: ignore[call-overload]
    with pytest.raises(ValueError, match="max_total_tokens"):
        Engine("m", max_total_tokens="4")  # type: ignore[call-overload]
    with pytest.raises(TypeError):
        Engine()  # type: ignore[call-overload]
