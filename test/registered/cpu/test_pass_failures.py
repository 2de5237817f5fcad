"""Whatever fails in a pass fails for one request, which ends with its error. To the others it is as
if nothing had happened, and nothing is lost: no slot, no row, no token.
"""

import itertools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import pytest

from srt.managers import forward_pass
from srt.managers.schedule_batch import FinishReason, Req, ReqUpdate
from srt.managers.scheduler import Scheduler
from srt.test.cache_invariants import check_consistent
from srt.test.cache_only_runner import CacheOnlyRunner, make_req, make_scheduler, run
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=5, suite="per-commit")

BAD = 2
# Sampled and greedy ones, with prefixes in common, text, log-probabilities, chunks of prompts.
PROMPTS = [[1, 2, 3], [1, 2, 3, 4, 5], [*range(24), 9], [1, 2, 7], list(range(30))]
LIKELY_LOGPROBS = 3


def requests() -> list[Req]:
    return [
        make_req(
            i,
            prompt,
            9 + i,
            text=True,
            temperature=i % 2 + (i == BAD),
            seed=i,
            return_logprob=True,
            return_prompt_logprob=i >= BAD,
            # Tells the bad request to what is patched.
            top_logprobs_num=LIKELY_LOGPROBS if i == BAD else 1,
        )
        for i, prompt in enumerate(PROMPTS)
    ]


def result(req: Req) -> Any:
    assert req.detokenizer is not None
    return (
        req.output_ids,
        req.detokenizer.text,
        req.logprobs,
        req.prompt_logprobs,
        req.finish_reason,
        req.error,
    )


@pytest.fixture(scope="module")
def undisturbed() -> list[Any]:
    reqs = requests()
    scheduler, _ = make_scheduler(size=90, rows=4)
    scheduler.add(reqs)
    run(scheduler)
    assert len({tuple(req.output_ids) for req in reqs}) == len(reqs)
    return [result(req) for req in reqs]


@dataclass
class Setting:
    """A scheduler with requests, where something is about to fail."""

    scheduler: Scheduler
    runner: CacheOnlyRunner
    reqs: list[Req]
    patch: pytest.MonkeyPatch

    def fail(self, owner: Any, name: str, error: BaseException, when: Callable[..., bool]) -> None:
        """Makes a function raise, after it has done its work, whenever `when` says so."""
        original = getattr(owner, name)

        def failing(*args: Any, **kwargs: Any) -> Any:
            hit = when(*args, **kwargs)
            value = original(*args, **kwargs)
            if hit:
                raise error
            return value

        self.patch.setattr(owner, name, failing)


@contextmanager
def setting() -> Iterator[Setting]:
    scheduler, runner = make_scheduler(size=90, rows=4)
    reqs = requests()
    scheduler.add(reqs)
    with pytest.MonkeyPatch.context() as patch:
        yield Setting(scheduler, runner, reqs, patch)


# Where a pass can fail because of one of its requests: what to patch, and when that is the bad one.
Stage = Callable[[Setting, BaseException, "Countdown"], None]


class Countdown:
    """True from the given time on that something happens; only then if it is to be `once`."""

    def __init__(self, count: int, once: bool = False) -> None:
        self.count, self.once = count, once

    def __call__(self, applies: bool) -> bool:
        self.count -= applies
        return applies and (self.count == 0 if self.once else self.count <= 0)


def in_sampler(s: Setting, error: BaseException, now: Countdown) -> None:
    s.fail(s.reqs[BAD].sampler, "choose", error, lambda *_: now(True))


def in_logprobs(s: Setting, error: BaseException, now: Countdown) -> None:
    def is_bad(logits: Any, ids: Any, top: int) -> bool:
        return now(top == LIKELY_LOGPROBS and len(ids) == 1)

    s.fail(forward_pass, "token_logprobs", error, is_bad)


def in_prompt_logprobs(s: Setting, error: BaseException, now: Countdown) -> None:
    s.fail(forward_pass, "_prompt_logprobs", error, lambda req, _: now(req is s.reqs[BAD]))


def in_detokenizer(s: Setting, error: BaseException, now: Countdown) -> None:
    # All have a class in common, and the bad one keeps its stop texts through copies.
    s.fail(type(s.reqs[BAD].detokenizer), "append", error, lambda d, _: now(d._stop == ("bad",)))
    s.patch.setattr(s.reqs[BAD].detokenizer, "_stop", ("bad",))


def in_extend(s: Setting, error: BaseException, now: Countdown) -> None:
    row = lambda parts: any(part.req_pool_idx == s.reqs[BAD].req_pool_idx for part in parts)  # noqa: E731
    s.fail(s.runner, "extend", error, lambda parts: now(row(parts)))


def in_decode(s: Setting, error: BaseException, now: Countdown) -> None:
    s.fail(s.runner, "decode", error, lambda _, rows, __: now(s.reqs[BAD].req_pool_idx in rows))


def in_share(s: Setting, error: BaseException, now: Countdown) -> None:
    s.fail(s.scheduler.kv, "share", error, lambda req: now(req is s.reqs[BAD]))


def in_admit(s: Setting, error: BaseException, now: Countdown) -> None:
    s.fail(s.scheduler.kv, "admit", error, lambda req, _: now(req is s.reqs[BAD]))


OF_ONE: list[Stage] = [
    in_sampler,
    in_logprobs,
    in_prompt_logprobs,
    in_detokenizer,
    in_extend,
    in_decode,
    in_share,
    in_admit,
]
# The first and the second time that it could fail there; a request is admitted once.
TIMES = [
    pytest.param(stage, time, id=f"{stage.__name__}-{time}")
    for stage in OF_ONE
    for time in (1, 2)
    if (stage, time) != (in_admit, 2)
]


def finish(scheduler: Scheduler) -> tuple[list[ReqUpdate], int]:
    """Runs on after every interruption; returns the updates and how many there were."""
    updates: list[ReqUpdate] = []
    interruptions = 0
    for _ in range(2000):
        if not scheduler.has_work:
            break
        try:
            updates += scheduler.step()
        except KeyboardInterrupt:
            interruptions += 1
        check_consistent(scheduler)
    check_consistent(scheduler, idle=True)
    return updates, interruptions


@pytest.mark.parametrize("error", [ValueError("broken"), MemoryError()], ids=["error", "memory"])
@pytest.mark.parametrize(("stage", "time"), TIMES)
def test_a_failing_request_ends_alone(
    stage: Stage, error: Exception, time: int, undisturbed: list[Any]
) -> None:
    with setting() as s:
        stage(s, error, Countdown(time))
        updates, _ = finish(s.scheduler)
        bad = s.reqs.pop(BAD)
        assert bad.finish_reason is FinishReason.ABORT
        assert str(bad.error) == f"request {BAD}: {type(error).__name__}: {error}".rstrip(": ")
        assert bad.error is not None
        assert bad.error.__cause__ is error
        ids, text, logprobs, _, _, _ = undisturbed[BAD]
        assert bad.output_ids == ids[: len(bad.output_ids)]
        assert bad.logprobs == logprobs[: len(bad.output_ids)]
        assert bad.detokenizer is not None
        assert text.startswith(bad.detokenizer.text)
    for req, expected in zip(s.reqs, undisturbed[:BAD] + undisturbed[BAD + 1 :], strict=True):
        assert result(req) == expected
    told = [one.token_id for one in updates if one.req is bad]
    assert told == [*bad.output_ids, None]
    assert "".join(one.text for one in updates if one.req is bad) == bad.detokenizer.text
    # The engine goes on as if nothing had been.
    again = requests()
    s.scheduler.add(again)
    finish(s.scheduler)
    assert [result(req) for req in again] == undisturbed


@pytest.mark.parametrize(("stage", "time"), TIMES)
def test_an_interrupted_pass_leaves_no_trace(
    stage: Stage, time: int, undisturbed: list[Any]
) -> None:
    with setting() as s:
        stage(s, KeyboardInterrupt(), Countdown(time, once=True))
        updates, interruptions = finish(s.scheduler)
    assert interruptions == 1
    assert [result(req) for req in s.reqs] == undisturbed
    for req in s.reqs:
        assert [one.token_id for one in updates if one.req is req] == req.output_ids


@pytest.mark.parametrize(
    # Its first token the request draws alone, the second beside others.
    ("stage", "time"),
    [(in_extend, 1), (in_decode, 1), (in_sampler, 2)],
    ids=lambda value: getattr(value, "__name__", ""),
)
def test_what_fails_once_costs_no_request(stage: Stage, time: int, undisturbed: list[Any]) -> None:
    """The requests of a pass that failed are computed one by one before any of them is blamed."""
    with setting() as s:
        stage(s, RuntimeError("once"), Countdown(time, once=True))
        finish(s.scheduler)
    assert [result(req) for req in s.reqs] == undisturbed


@pytest.mark.parametrize("method", ["extend", "decode"])
def test_if_all_fail_all_end_and_the_engine_goes_on(method: str, undisturbed: list[Any]) -> None:
    with setting() as s:
        s.fail(s.runner, method, RuntimeError("no model"), lambda *_: True)
        finish(s.scheduler)
        assert {str(req.error) for req in s.reqs} == {
            f"request {i}: RuntimeError: no model" for i in range(len(PROMPTS))
        }
    again = requests()
    s.scheduler.add(again)
    finish(s.scheduler)
    assert [result(req) for req in again] == undisturbed


@pytest.mark.parametrize("method", ["release", "grow", "match", "reset"])
@pytest.mark.parametrize("error", [MemoryError(), KeyboardInterrupt()], ids=["memory", "ctrl-c"])
def test_books_that_cannot_be_changed_begin_anew(
    method: str, error: BaseException, undisturbed: list[Any]
) -> None:
    """Releasing is not for a request that runs on, growing and matching not for one alone."""
    with setting() as s:
        calls = itertools.count(1)
        if method == "reset":
            s.fail(s.scheduler.kv, "grow", KeyboardInterrupt(), lambda _: next(calls) == 3)
            again = itertools.count(1)
            s.fail(s.scheduler.kv, "reset", error, lambda _: next(again) == 1)
        else:
            s.fail(s.scheduler.kv, method, error, lambda *_: next(calls) == 3)
        interruptions = 0
        while s.scheduler.has_work:
            try:
                s.scheduler.step()
            except (KeyboardInterrupt, MemoryError):
                interruptions += 1
        check_consistent(s.scheduler, idle=True)
    assert next(calls) > 4, "it has not failed"
    failed = [req for req in s.reqs if req.error is not None]
    assert len(failed) + interruptions <= 1
    for req, expected in zip(s.reqs, undisturbed, strict=True):
        if req not in failed:
            assert result(req) == expected


def test_updates_that_cannot_be_delivered_come_again() -> None:
    scheduler, _ = make_scheduler()
    req = make_req(0, [1, 2], 4)
    scheduler.add([req])
    told: list[int | None] = []
    failures = iter([True, False, True, True, False, False, False])

    def deliver(one: ReqUpdate) -> None:
        if next(failures):
            raise OSError("the reader is gone")
        told.append(one.token_id)

    errors = 0
    while scheduler.has_work:
        try:
            scheduler.run_pass(deliver)
        except OSError:
            errors += 1
        check_consistent(scheduler)
    assert errors == 3
    assert told == req.output_ids
