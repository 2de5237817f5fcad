"""What is asked: prompts of random tokens, prompts with a common beginning, those of a file."""

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from srt.errors import RequestError


@dataclass(frozen=True)
class BenchRequest:
    """One request.

    Attributes:
        prompt: Text, token ids or messages.
        output_len: Most tokens of its answer.
        exact: Whether the answer is to have just as many.
    """

    prompt: str | list[int] | list[dict[str, Any]]
    output_len: int
    exact: bool


@dataclass(frozen=True)
class RandomDataset:
    """Prompts of random tokens, each with its own lengths.

    Attributes:
        input_len: Fewest and most tokens of a prompt, without the prefix.
        output_len: Fewest and most tokens of an answer.
        token_ids: Tokens are drawn from these, the second excluded. The default has no special
            token of Llama, Qwen, Mistral, DeepSeek or SmolLM.
        prefix_len: Tokens that prompts have in common.
        prefixes: How many such beginnings there are; prompts take them in turns.
        exact: Whether answers are to have just their length.
    """

    input_len: tuple[int, int]
    output_len: tuple[int, int]
    token_ids: tuple[int, int] = (1000, 20000)
    prefix_len: int = 0
    prefixes: int = 1
    exact: bool = True

    def draw(self, count: int, seed: str) -> list[BenchRequest]:
        """Requests, always the same for a seed."""
        rng = random.Random(seed)

        def tokens(number: int) -> list[int]:
            return [rng.randrange(*self.token_ids) for _ in range(number)]

        heads = [tokens(self.prefix_len) for _ in range(self.prefixes)]
        return [
            BenchRequest(
                heads[index % self.prefixes] + tokens(rng.randint(*self.input_len)),
                rng.randint(*self.output_len),
                exact=self.exact,
            )
            for index in range(count)
        ]


@dataclass(frozen=True)
class FileDataset:
    """Prompts of a file.

    Attributes:
        requests: All of them, in order.
    """

    requests: Sequence[BenchRequest]

    def draw(self, count: int, seed: str) -> list[BenchRequest]:
        """The file's requests in an order that the seed says, from the beginning again if there are
        too few.
        """
        order = list(self.requests)
        random.Random(seed).shuffle(order)
        return [order[index % len(order)] for index in range(count)]

    @classmethod
    def read(cls, file: Path, output_len: int, exact: bool) -> "FileDataset":
        """Reads a file of one JSON object a line: `{"prompt": TEXT}`, `{"prompt": [ID, ...]}` or
        `{"messages": [...]}`, each with `max_tokens` if it is not to be `output_len`; or a list of
        conversations in ShareGPT's form, of which the first turn is asked.

        Raises:
            RequestError: It cannot be read, or a line has none of these.
        """
        try:
            text = file.read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise RequestError(f"cannot read --dataset-file {file}: {error}") from error
        is_list = text.lstrip().startswith("[")
        try:
            rows = json.loads(text) if is_list else list(map(json.loads, text.splitlines()))
        except ValueError as error:
            raise RequestError(f"--dataset-file {file}: not JSON: {error}") from error
        if not rows:
            raise RequestError(f"--dataset-file {file}: expected prompts, found none")
        default = BenchRequest("", output_len, exact)
        return cls([_read(row, f"{file}:{place}", default) for place, row in enumerate(rows, 1)])


def _read(row: Any, where: str, default: BenchRequest) -> BenchRequest:
    row = row if isinstance(row, dict) else {}
    length = row.get("max_tokens", default.output_len)
    prompt = row.get("prompt") or row.get("messages")
    turns = row.get("conversations")
    if prompt is None and isinstance(turns, list) and turns and isinstance(turns[0], dict):
        prompt = turns[0].get("value")
    if not isinstance(prompt, str | list) or not prompt:
        raise RequestError(f"{where}: expected an object with prompt, messages or conversations")
    if not isinstance(length, int) or length < 1:
        raise RequestError(f"{where}: max_tokens: expected 1 or more, found {length!r}")
    return replace(default, prompt=prompt, output_len=length)
