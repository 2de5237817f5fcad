"""The FP8 demo model against transformers in float32 over its dequantised weights: greedy tokens,
and log-probabilities in prefill and in decode through the KV cache.
"""

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from srt.configs.model_config import ModelConfig
from srt.managers.tokenizer import encode_chat, load_tokenizer
from srt.test.ci_register import register_cpu_ci
from srt.test.contiguous_runner import ContiguousRunner, DecodeInput, ExtendInput
from srt.test.tiny_llama import reference_model

register_cpu_ci(est_time=60, suite="per-commit")

MODEL = Path(__file__).parents[3] / ".demo" / "SmolLM2-135M-Instruct-FP8"
pytestmark = pytest.mark.skipif(
    not (MODEL / "config.json").is_file(), reason=f"no demo model in {MODEL}; run: make demo-model"
)

NEW_TOKENS = 64
TOP = 20
PROMPTS = [
    "What is the capital of France?",
    "Write a short poem about the sea.",
    "Explain why the sky is blue in two sentences.",
    "List three fruits that are red.",
    "Translate 'good morning' into Spanish.",
    "Who wrote Romeo and Juliet?",
    "Give me a recipe for pancakes.",
    "What is 12 times 7?",
    "Describe a cat to someone who has never seen one.",
    "Write a Python function that adds two numbers.",
]


class Run:
    """One prompt's greedy output of ours, and the reference's logits over the same tokens."""

    def __init__(self, runner: ContiguousRunner, reference: Any, ids: list[int]) -> None:
        self.ours = [runner.extend([ExtendInput(ids, 0, 1)])]
        self.tokens = [int(self.ours[0].argmax())]
        while len(self.tokens) < NEW_TOKENS:
            position = len(ids) + len(self.tokens) - 1
            self.ours.append(runner.decode([DecodeInput(self.tokens[-1], position, 1)]))
            self.tokens.append(int(self.ours[-1].argmax()))
        with torch.inference_mode():
            logits = reference(torch.tensor([ids + self.tokens[:-1]])).logits[0]
        # Row i is the prediction of token i of the output; row 0 comes from the prefill.
        self.reference: Tensor = logits[len(ids) - 1 :]

    def parts_at(self) -> int | None:
        """First output token that is not the reference's most likely one."""
        differs = self.reference.argmax(-1) != torch.tensor(self.tokens)
        return int(differs.nonzero()[0]) if differs.any() else None


@pytest.fixture(scope="module")
def runs() -> list[Run]:
    runner = ContiguousRunner(
        ModelConfig.from_pretrained(MODEL), max_total_tokens=1024, progress=False
    )
    reference = reference_model(MODEL)
    tokenizer = load_tokenizer(MODEL)
    prompts = [encode_chat(tokenizer, [{"role": "user", "content": text}]) for text in PROMPTS]
    return [Run(runner, reference, ids) for ids in prompts]


def test_greedy_tokens_are_the_same(runs: list[Run]) -> None:
    """On at least 9 of 10 prompts; where one parts, the reference itself is nearly undecided."""
    parted = [(run, at) for run in runs if (at := run.parts_at()) is not None]
    for run, at in parted:
        first, second = run.reference[at].topk(2).values.tolist()
        assert (first - second) / abs(first) < 0.01
    assert len(parted) <= 1


@pytest.mark.parametrize("phase", ["prefill", "decode"])
def test_log_probabilities(runs: list[Run], phase: str) -> None:
    """The reference's 20 most likely tokens differ by less than 0.15."""
    worst = 0.0
    for run in runs:
        rows = slice(0, 1) if phase == "prefill" else slice(1, NEW_TOKENS)
        reference = run.reference[rows].log_softmax(-1)
        ours = torch.cat(run.ours)[rows].log_softmax(-1)
        top = reference.topk(TOP).indices
        difference = (reference.gather(-1, top) - ours.gather(-1, top)).abs().max()
        worst = max(worst, difference.item())
    assert worst < 0.15
