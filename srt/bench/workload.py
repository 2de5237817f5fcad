"""What is timed: prompts of one length, so many at once, with so many tokens generated for each."""

import statistics
import time
from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from srt.entrypoints.engine import Engine
from srt.errors import SrtError
from srt.sampling.sampling_params import SamplingParams


@dataclass(frozen=True)
class Case:
    """One workload.

    Attributes:
        batch: Prompts that run together.
        input_len: Tokens of each prompt.
        output_len: Tokens generated for each, at least 2.
    """

    batch: int
    input_len: int
    output_len: int


@dataclass(frozen=True)
class Measurement:
    """One run of a case, in tokens a second over all prompts.

    Attributes:
        prefill: Prompt tokens over the time until every prompt has its first token.
        decode: Tokens after that.
    """

    prefill: float
    decode: float


@dataclass
class Series:
    """All runs of a case by one contender."""

    contender: str
    case: Case
    runs: list[Measurement] = field(default_factory=list)

    def to_dict(self) -> dict[str, Any]:
        """For JSON: medians, extremes and every run."""
        prefill, decode = [run.prefill for run in self.runs], [run.decode for run in self.runs]
        return {
            "contender": self.contender,
            "batch": self.case.batch,
            "input_len": self.case.input_len,
            "output_len": self.case.output_len,
            "prefill_tokens_per_second": statistics.median(prefill),
            "decode_tokens_per_second": statistics.median(decode),
            "prefill_range": [min(prefill), max(prefill)],
            "decode_range": [min(decode), max(decode)],
            "prefill_runs": prefill,
            "decode_runs": decode,
        }


class Contender(ABC):
    """Something that generates.

    Attributes:
        name: What the table calls it.
    """

    name: str

    @abstractmethod
    def run(self, case: Case) -> Measurement:
        """Runs a case once."""

    def supports(self, case: Case) -> bool:
        """Whether it can run the case."""
        return True


class OurEngine(Contender):
    """This runtime.

    Args:
        engine: Loaded, without a prefix cache: a prompt is computed each time.
        name: What the table calls it.
    """

    def __init__(self, engine: Engine, name: str) -> None:
        self.name = name
        self._engine = engine

    def run(self, case: Case) -> Measurement:
        params = SamplingParams(temperature=0, max_new_tokens=case.output_len, ignore_eos=True)
        prompts = random_prompts(case, self._engine.model_config.vocab_size)
        started = time.perf_counter()
        first: set[int] = set()
        prefilled = started
        decoded = 0
        for chunk in self._engine.generate(input_ids=prompts, sampling_params=params, stream=True):
            if chunk.output is not None and chunk.output.error is not None:
                raise SrtError(chunk.output.error)
            if len(first) == case.batch:
                decoded += 1
                continue
            first.add(chunk.index)
            prefilled = time.perf_counter()
        ended = time.perf_counter()
        return Measurement(
            case.batch * case.input_len / (prefilled - started), decoded / (ended - prefilled)
        )


def random_prompts(case: Case, vocab_size: int) -> list[list[int]]:
    """Prompts of random tokens, always the same ones."""
    generator = torch.Generator().manual_seed(0)
    shape = (case.batch, case.input_len)
    prompts: list[list[int]] = torch.randint(vocab_size, shape, generator=generator).tolist()
    return prompts


def measure(
    contenders: Sequence[Contender], cases: Sequence[Case], repetitions: int
) -> list[Series]:
    """Every contender's runs of every case. Repetitions are interleaved, so that a machine that
    changes its mind meanwhile does so for all; the first run of each is not counted.
    """
    result = []
    for case in cases:
        series = [Series(c.name, case) for c in contenders if c.supports(case)]
        able = [c for c in contenders if c.supports(case)]
        for repetition in range(repetitions + 1):
            for contender, one in zip(able, series, strict=True):
                run = contender.run(case)
                if repetition > 0:
                    one.runs.append(run)
        result += series
    return result
