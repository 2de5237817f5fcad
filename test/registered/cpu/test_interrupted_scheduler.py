"""Exceptions at any bytecode of the scheduler and of what it calls, where no signal handler can be
kept from raising them: a second Ctrl-C, a debugger, a lack of memory. Requests get what they would
have got, and the scheduler's state is consistent after each.
"""

import random
import sys
from collections.abc import Callable
from functools import partial
from types import FrameType
from typing import Any

import pytest

from srt.managers.schedule_batch import FinishReason, Req, ReqUpdate
from srt.managers.scheduler import Scheduler
from srt.test.cache_invariants import check_consistent
from srt.test.cache_only_runner import make_req, make_scheduler
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=8, suite="per-commit")

WATCHED = ("/srt/managers/", "/srt/mem_cache/", "/srt/utils/exclusive", "/srt/utils/deferred")


class Bomb:
    """Raises an error after a number of bytecodes of the modules watched, and perhaps again in the
    recovery from it.
    """

    def __init__(self, scheduler: Scheduler, error: type[BaseException]) -> None:
        self.error = error
        self.left = 0
        self.again: int | None = None
        self.hits = 0
        recover = scheduler._recover

        def recover_under_fire() -> None:
            if self.left < 0 and self.again is not None:
                self.left, self.again = self.again, None
                sys.settrace(self._trace)
            recover()

        scheduler._recover = recover_under_fire  # type: ignore[method-assign]

    def call(self, function: Callable[[], Any], after: int, again: int | None) -> Any:
        """Calls a function under fire."""
        self.left, self.again = after, again
        before = sys.gettrace()
        sys.settrace(self._trace)
        try:
            return function()
        finally:
            sys.settrace(before)

    def _trace(self, frame: FrameType, event: str, arg: object) -> Any:
        if not any(part in frame.f_code.co_filename for part in WATCHED):
            return None
        frame.f_trace_opcodes = True
        if event == "opcode":
            self.left -= 1
            if self.left < 0:
                self.hits += 1
                # Python stops tracing now.
                raise self.error
        return self._trace


PREFIX = list(range(20))


class Workload:
    """Requests that share prefixes and do not fit together. One will be aborted, one dropped."""

    ABORTED, DROPPED = 4, 5

    def __init__(self, seed: int) -> None:
        rng = random.Random(seed)
        self.options: dict[str, Any] = {
            "size": rng.randint(50, 80),
            "rows": 3,
            "chunk": rng.choice([4, 16]),
        }
        shared = [PREFIX[: rng.choice([0, 3, 20])] for _ in range(6)]
        self._prompts = [
            [*prefix, *rng.choices(range(50), k=rng.randint(1, 9))] for prefix in shared
        ]
        self._lengths = [rng.randint(1, 15) for _ in shared]
        self.reqs = [self.make(i) for i in range(6)]

    def make(self, i: int) -> Req:
        return make_req(
            i,
            self._prompts[i],
            self._lengths[i],
            text=True,
            temperature=i % 2,
            seed=i,
            return_logprob=True,
            return_prompt_logprob=i == 3,
        )


def result(req: Req) -> Any:
    assert req.detokenizer is not None
    return (req.output_ids, req.detokenizer.text, req.logprobs, req.prompt_logprobs)


def drive(seed: int, error: type[BaseException] | None) -> tuple[list[Req], int]:
    """Runs a workload, under fire or not; returns its requests and how often it was hit."""
    workload, rng = Workload(seed), random.Random(seed)
    scheduler, _ = make_scheduler(**workload.options)
    bomb = Bomb(scheduler, error or KeyboardInterrupt)
    reqs, updates = workload.reqs, list[ReqUpdate]()
    number = 0

    def returns(function: Callable[[], Any]) -> bool:
        if error is None:
            function()
            return True
        again = rng.randrange(400) if rng.random() < 0.3 else None
        try:
            # Less and less often: what never gets through a prompt in peace never ends.
            bomb.call(function, rng.randrange(5000 + 100 * number), again)
            return True
        except error:
            return False
        finally:
            # What was hit while it recovered is recovered by the next call.
            if scheduler._is_consistent:
                check_consistent(scheduler)

    for number in range(2000):
        if number < len(reqs):
            while not returns(partial(scheduler.add, [reqs[number]])):
                # It has not been queued, or will not run.
                reqs[number] = workload.make(number)
        if number == 9:
            while not returns(partial(scheduler.abort, [Workload.ABORTED])):
                pass
        if number == 12:
            while not returns(partial(scheduler.drop, [reqs[Workload.DROPPED]])):
                pass
        returns(partial(scheduler.run_pass, updates.append))
        if number > 12 and not scheduler.has_work:
            break
    check_consistent(scheduler, idle=True)
    check_delivery(reqs, updates)
    return reqs, bomb.hits


def check_delivery(reqs: list[Req], updates: list[ReqUpdate]) -> None:
    """Each token is delivered once, or twice in a row if its delivery was interrupted."""
    once = [one for i, one in enumerate(updates) if i == 0 or one is not updates[i - 1]]
    for req in reqs[: Workload.DROPPED]:
        tokens = [one.token_id for one in once if one.req is req and one.token_id is not None]
        assert tokens == req.output_ids
        assert [one.is_last for one in once if one.req is req][-1:] == [True]


def check_against_undisturbed(seed: int, error: type[BaseException]) -> list[Req]:
    """Runs a workload in peace and under fire and compares; returns those that failed."""
    expected, _ = drive(seed, None)
    reqs, hits = drive(seed, error)
    assert hits >= 3
    for req, peaceful in zip(reqs, expected, strict=True):
        assert all(req.error is None or "MemoryError" in str(req.error) for req in reqs)
        if req.rid in (Workload.ABORTED, Workload.DROPPED) or req.error is not None:
            # Ended early, at another token than in peace.
            shorter, longer = sorted([req.output_ids, peaceful.output_ids], key=len)
            assert longer[: len(shorter)] == shorter
        else:
            assert req.finish_reason is FinishReason.LENGTH
            assert result(req) == result(peaceful)
    return [req for req in reqs if req.error is not None]


SEEDS = [*range(8), *(pytest.param(seed, marks=pytest.mark.slow) for seed in range(8, 60))]


@pytest.mark.parametrize("seed", SEEDS)
def test_ctrl_c_at_any_bytecode(seed: int) -> None:
    assert not check_against_undisturbed(seed, KeyboardInterrupt)


@pytest.mark.parametrize("seed", SEEDS)
def test_a_lack_of_memory_at_any_bytecode(seed: int) -> None:
    # It may hit each request once, and what is nobody's is raised.
    check_against_undisturbed(1000 + seed, MemoryError)
