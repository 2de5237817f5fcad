"""A model runner whose callers say themselves where in the cache a request is: from one slot on, in
a row. For tests that compare logits and have no scheduler.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
from torch import Tensor

from srt.configs.engine_config import EngineConfig
from srt.configs.model_config import ModelConfig
from srt.model_executor import model_runner
from srt.model_executor.model_runner import ModelRunner


@dataclass(frozen=True)
class ExtendInput:
    """Prompt tokens of one request: `prefix_len` tokens before them are in the cache, whose slot
    `cache_start` holds the first of all.
    """

    token_ids: Sequence[int]
    prefix_len: int
    cache_start: int


@dataclass(frozen=True)
class DecodeInput:
    """The last token of one request; `position` is its place in the request."""

    token_id: int
    position: int
    cache_start: int


class ContiguousRunner:
    """A ModelRunner, with requests told apart by their first slot.

    Args:
        config: The model's configuration.
        options: Of the engine.
    """

    def __init__(self, config: ModelConfig, **options: Any) -> None:
        self.runner = ModelRunner(config, EngineConfig(config.path, **options))
        self._rows: dict[int, int] = {}

    def extend(self, inputs: Sequence[ExtendInput], *, all_logits: bool = False) -> Tensor:
        """Computes prompt tokens; returns logits after each part's last, or after every one."""
        return self.runner.extend(
            [
                model_runner.ExtendInput(
                    part.token_ids,
                    part.prefix_len,
                    self._row(part.cache_start, part.prefix_len + len(part.token_ids)),
                    all_logits,
                )
                for part in inputs
            ]
        )

    def decode(self, inputs: Sequence[DecodeInput]) -> Tensor:
        """Computes one token of each request; returns the logits of the next."""
        logits = self.runner.decode(
            [part.token_id for part in inputs],
            [self._row(part.cache_start, part.position + 1) for part in inputs],
            [part.position + 1 for part in inputs],
        )
        return logits.clone()

    def _row(self, start: int, length: int) -> int:
        pool = self.runner.req_to_token_pool
        if start not in self._rows:
            row = pool.alloc()
            assert row is not None, "more requests than max_running_requests"
            self._rows[start] = row
        row = self._rows[start]
        pool.table[row, :length] = np.arange(start, start + length)
        return row
