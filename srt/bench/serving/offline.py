"""An engine without a server: what a server's cost is measured against."""

import math
import time
from collections.abc import Sequence
from typing import Any

from srt.bench.serving.contenders import Contender, Progress
from srt.bench.serving.dataset import BenchRequest
from srt.bench.serving.load import Load
from srt.bench.serving.timings import Timing
from srt.entrypoints.engine import Engine
from srt.errors import RequestError


class OfflineEngine(Contender):
    """An engine in this process. Requests wait for one another as `load.concurrency` says; a rate
    has no meaning here.
    """

    def __init__(self, engine: Engine, name: str = "engine in process") -> None:
        self.name = name
        self._engine = engine

    def run(
        self, load: Load, requests: Sequence[BenchRequest], seed: str, progress: Progress
    ) -> list[Timing]:
        if not math.isinf(load.rate):
            raise RequestError("--offline: expected --concurrency, since no requests arrive")
        waiting = list(enumerate(requests))[::-1]
        started: dict[str, float] = {}
        arrivals: dict[str, list[float]] = {}
        timings: dict[str, Timing] = {}
        most = load.concurrency or len(requests)
        while waiting or self._engine.has_work:
            while waiting and len(started) - len(timings) < most:
                index, request = waiting.pop()
                rid = str(index)
                started[rid], arrivals[rid] = time.perf_counter(), []
                self._add(rid, request)
            for chunk in self._engine.step():
                now, rid = time.perf_counter(), str(chunk.rid)
                if chunk.token_id is not None:
                    arrivals[rid].append(now)
                if chunk.output is None:
                    continue
                progress()
                output = chunk.output
                timings[rid] = Timing(
                    started[rid],
                    now,
                    tuple(arrivals[rid]),
                    output.prompt_tokens,
                    output.completion_tokens,
                    "error" if output.error else None,
                )
        return [timings[str(index)] for index in range(len(requests))]

    def _add(self, rid: str, request: BenchRequest) -> None:
        params = {
            "temperature": 0.0,
            "max_new_tokens": request.output_len,
            "ignore_eos": request.exact,
        }
        prompt: Any = request.prompt
        if isinstance(prompt, str):
            self._engine.add_request(rid, prompt, params)
        elif isinstance(prompt[0], dict):
            self._engine.add_request(rid, None, params, messages=prompt)
        else:
            self._engine.add_request(rid, None, params, input_ids=prompt)
