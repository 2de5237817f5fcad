"""The scheduler over a model that is only its cache."""

import threading
from collections.abc import Callable
from dataclasses import dataclass

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from srt.errors import RequestError
from srt.managers.fair_shares import share_out
from srt.managers.schedule_batch import FinishReason, ReqUpdate
from srt.managers.scheduler import Scheduler
from srt.mem_cache.cache_size import choose_cache_size
from srt.test.cache_invariants import check_consistent
from srt.test.cache_only_runner import (
    VOCAB,
    expected_output,
    make_req,
    make_scheduler,
    next_token,
    run,
)
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=7, suite="per-commit")


@dataclass
class Job:
    """A request of a random workload: its prompt shares a prefix with others of its family."""

    family: int
    shared: int
    own: int
    new_tokens: int
    arrives: int
    aborts: int | None

    def prompt(self, index: int) -> list[int]:
        return [self.family] * self.shared + [(7 * index + i) % VOCAB for i in range(self.own)]


JOBS = st.builds(
    Job,
    family=st.integers(0, 2),
    shared=st.integers(0, 40),
    own=st.integers(1, 12),
    new_tokens=st.integers(1, 20),
    arrives=st.integers(0, 30),
    aborts=st.none() | st.integers(0, 60),
)


@settings(max_examples=250, deadline=None, derandomize=True, database=None)
@given(
    jobs=st.lists(JOBS, min_size=1, max_size=14),
    size=st.integers(71, 160),
    rows=st.integers(1, 6),
    chunk=st.sampled_from([1, 7, 16, 64]),
    radix=st.booleans(),
)
def test_every_request_gets_what_it_would_get_alone(
    jobs: list[Job], size: int, rows: int, chunk: int, radix: bool
) -> None:
    scheduler, _ = make_scheduler(size, rows, chunk, radix)
    reqs = [make_req(i, job.prompt(i), job.new_tokens) for i, job in enumerate(jobs)]
    events: list[ReqUpdate] = []
    step = 0
    while step < 61 or scheduler.has_work:
        scheduler.add([r for r, job in zip(reqs, jobs, strict=True) if job.arrives == step])
        scheduler.abort([r.rid for r, job in zip(reqs, jobs, strict=True) if job.aborts == step])
        events += scheduler.step()
        if step % 5 == 0:
            check_consistent(scheduler)
        step += 1
        assert step < 5000, "the scheduler makes no progress"
    for req, job in zip(reqs, jobs, strict=True):
        expected = expected_output(req.prompt_ids, job.new_tokens)
        assert req.output_ids == expected[: len(req.output_ids)]
        if req.finish_reason is not FinishReason.ABORT:
            assert req.finish_reason is FinishReason.LENGTH
            assert len(req.output_ids) == job.new_tokens
        assert [e.token_id for e in events if e.req is req and e.token_id is not None] == (
            req.output_ids
        )
    assert scheduler.kv.available_size == size
    assert scheduler.kv.has_row


def test_sixty_four_requests_with_a_shared_prefix_compute_it_once() -> None:
    prefix = list(range(40)) * 3
    prompts = [[*prefix, i, i + 1, i + 2] for i in range(40)] + [[i] * 50 for i in range(24)]
    scheduler, runner = make_scheduler(size=8000, rows=64, chunk=512)
    reqs = [make_req(i, prompt, 5) for i, prompt in enumerate(prompts)]
    scheduler.add(reqs)
    run(scheduler)
    assert [r.output_ids for r in reqs] == [expected_output(p, 5) for p in prompts]
    # The prefix once, and everything after it; [i] * 50 share nothing.
    assert runner.extended == 120 + 40 * 3 + 24 * 50
    assert [r.cached_tokens for r in reqs[:40]] == [0] + [120] * 39


def test_running_requests_decode_between_the_chunks_of_a_prompt() -> None:
    scheduler, runner = make_scheduler(size=400, chunk=8)
    scheduler.add([make_req(0, [1, 2], 50)])
    scheduler.step()
    scheduler.add([make_req(1, list(range(40)), 2)])
    runner.passes.clear()
    for _ in range(9):
        scheduler.step()
    assert runner.passes == ["decode", "extend"] * 4 + ["decode"]


def passes_until(scheduler: Scheduler, condition: Callable[[], bool]) -> int:
    count = 0
    while not condition():
        scheduler.step()
        count += 1
        assert count < 5000, "the scheduler makes no progress"
    return count


def test_a_long_prompt_keeps_others_neither_from_their_first_nor_their_next_token() -> None:
    scheduler, runner = make_scheduler(size=1000, chunk=8)
    talker = make_req("talker", [1, 2], 200)
    scheduler.add([talker])
    scheduler.step()
    long = make_req("long", [i % VOCAB for i in range(400)], 3)
    scheduler.add([long])
    scheduler.step()
    late = [make_req(f"late {i}", [9 + i] * 6, 3) for i in range(3)]
    scheduler.add(late)
    runner.passes.clear()
    before, extended, said = long.kv_len, runner.extended, len(talker.output_ids)
    count = passes_until(scheduler, lambda: all(req.output_ids for req in late))
    # A short pass while another decodes: a quarter of 8 tokens, half of it for the three.
    assert count <= 2 * 3 * 6 + 1
    extends = runner.passes.count("extend")
    assert runner.extended - extended == 2 * extends
    assert long.kv_len - before == extends
    assert len(talker.output_ids) - said >= extends - 1
    run(scheduler)
    for req, new in ((talker, 200), (long, 3), *((req, 3) for req in late)):
        assert req.output_ids == expected_output(req.prompt_ids, new)


def test_short_prompts_do_not_keep_a_long_one_from_going_on() -> None:
    scheduler, runner = make_scheduler(size=1000, rows=8, chunk=8)
    long = make_req("long", [i % VOCAB for i in range(160)], 1)
    scheduler.add([long])
    scheduler.step()
    count = 0
    while not long.output_ids:
        # As many as can run at all, each of another prefix and ending with its first token.
        count += 1
        scheduler.add([make_req(count, [count % VOCAB, (count // VOCAB) % VOCAB, 3], 1)])
        scheduler.step()
        assert count <= 2 * 160 / 8
    assert runner.passes.count("decode") == 0


def test_prompts_of_one_pass_and_equal_ones_are_computed_in_the_order_of_arrival() -> None:
    assert share_out([("a", 5), ("b", 1000), ("c", 2)], 8, others_decode=True) == [
        ("a", 5),
        ("b", 3),
    ]
    assert share_out([("a", 20), ("b", 20), ("c", 20)], 8, others_decode=True) == [("a", 8)]
    assert share_out([("a", 33), ("b", 4), ("c", 2)], 16, others_decode=True) == [
        ("a", 10),
        ("c", 2),
        ("b", 4),
    ]
    assert share_out([("a", 500)], 1, others_decode=True) == [("a", 1)]
    assert share_out([("a", 500)], 16, others_decode=False) == [("a", 16)]
    assert share_out([("a", 500)], 16, others_decode=True) == [("a", 4)]


def test_under_pressure_the_last_request_steps_back_and_ends_right() -> None:
    scheduler, _ = make_scheduler(size=100, chunk=64)
    reqs = [make_req(i, [i] * 4, 60) for i in range(2)]
    scheduler.add(reqs)
    run(scheduler)
    assert scheduler.num_retractions >= 1
    assert [r.output_ids for r in reqs] == [expected_output([i] * 4, 60) for i in range(2)]
    # The first came first and was never interrupted.
    assert reqs[0].finished_at < reqs[1].finished_at
    assert scheduler.kv.available_size == 100


@pytest.mark.parametrize("radix", [True, False])
def test_an_ended_request_leaves_its_prefix(radix: bool) -> None:
    scheduler, runner = make_scheduler(radix=radix)
    prompt = list(range(30))
    first, second = make_req(0, prompt, 4), make_req(1, [*prompt, 49], 1)
    for req in (first, second):
        scheduler.add([req])
        run(scheduler)
    assert second.cached_tokens == (30 if radix else 0)
    assert runner.extended == 30 + (1 if radix else 31)
    # The whole of what was generated counts, too, but for its last token, which was never computed.
    third = make_req(2, [*prompt, *first.output_ids], 1)
    scheduler.add([third])
    run(scheduler)
    assert third.cached_tokens == (33 if radix else 0)


def test_a_request_that_cannot_fit_is_refused_and_others_run() -> None:
    scheduler, _ = make_scheduler(size=20)
    running = make_req(0, [1, 2, 3], 5)
    scheduler.add([running])
    scheduler.step()
    with pytest.raises(
        RequestError, match=r"request 7 .* 18 prompt tokens and 4 new ones need 21 slots.* has 20"
    ):
        scheduler.add([make_req(6, [1], 1), make_req(7, [2] * 18, 4)])
    run(scheduler)
    assert running.output_ids == expected_output([1, 2, 3], 5)


def test_a_request_of_the_whole_cache_waits_for_it() -> None:
    scheduler, _ = make_scheduler(size=20, chunk=64)
    reqs = [make_req(0, [1] * 6, 6), make_req(1, [2] * 10, 11), make_req(2, [3] * 3, 2)]
    scheduler.add(reqs)
    run(scheduler)
    for req in reqs:
        assert req.output_ids == expected_output(req.prompt_ids, req.max_new_tokens)


def test_a_row_that_is_not_finite_ends_its_request_only() -> None:
    scheduler, runner = make_scheduler()
    runner.bad_token = 13
    good, bad = make_req(0, [1, 2], 6), make_req(1, [13, 2], 6)
    scheduler.add([good, bad])
    run(scheduler)
    assert good.output_ids == expected_output([1, 2], 6)
    assert bad.finish_reason is FinishReason.ABORT
    assert str(bad.error).startswith("request 1: logits are not finite")
    assert scheduler.kv.available_size == scheduler.kv.size


def test_abort_reaches_waiting_and_running_requests_and_no_others() -> None:
    scheduler, _ = make_scheduler(rows=2)
    reqs = [make_req(i, [i] * 20, 30) for i in range(4)]
    scheduler.add(reqs)
    for _ in range(4):
        scheduler.step()
    scheduler.abort([1, 3, 99])
    ended = [event.req for event in scheduler.step() if event.token_id is None]
    assert ended == [reqs[1], reqs[3]]
    run(scheduler)
    assert [r.finish_reason for r in reqs] == [
        FinishReason.LENGTH,
        FinishReason.ABORT,
        FinishReason.LENGTH,
        FinishReason.ABORT,
    ]
    assert reqs[2].output_ids == expected_output([2] * 20, 30)


def test_requests_come_from_other_threads() -> None:
    scheduler, _ = make_scheduler(size=1000)
    reqs = [make_req(i, [i, i + 1], 10) for i in range(40)]
    threads = [
        threading.Thread(target=scheduler.add, args=([*reqs[i : i + 10]],)) for i in (0, 10, 20, 30)
    ]
    for thread in threads:
        thread.start()
    while any(req.finish_reason is None for req in reqs):
        scheduler.step()
    assert [r.output_ids for r in reqs] == [expected_output([i, i + 1], 10) for i in range(40)]


def test_log_probabilities() -> None:
    scheduler, _ = make_scheduler(chunk=5)
    prompt = list(range(12))
    plain = make_req(0, prompt, 3)
    req = make_req(
        1, prompt, 3, return_logprob=True, top_logprobs_num=2, return_prompt_logprob=True
    )
    for one in (plain, req):
        scheduler.add([one])
        run(scheduler)
    assert plain.logprobs == plain.prompt_logprobs == []
    likely, other = torch.tensor([5.0] + [0.0] * (VOCAB - 1)).log_softmax(-1)[:2].tolist()
    assert [entry.token_id for entry in req.logprobs] == req.output_ids
    for entry in req.logprobs:
        assert entry.logprob == pytest.approx(likely)
        assert entry.top[0][0] == entry.token_id
        assert [logprob for _, logprob in entry.top] == pytest.approx([likely, other])
    # The prefix that is in the cache is computed again: its logits are wanted.
    assert req.cached_tokens == 0
    first, *rest = req.prompt_logprobs
    assert first is None
    assert [entry.token_id for entry in rest if entry is not None] == prompt[1:]
    for i, of_prompt in enumerate(rest, start=1):
        expected = likely if next_token(prompt[:i]) == prompt[i] else other
        assert of_prompt is not None
        assert of_prompt.logprob == pytest.approx(expected)


@pytest.mark.parametrize(
    ("max_total_tokens", "fraction", "available", "expected"),
    [
        (None, 0.5, None, 1000),
        (None, 0.5, 10**6, 1000),
        (None, 0.5, 40_000, 200),
        (None, 0.9, 40_000, 360),
        (300, 0.5, 40_000, 300),
        (5000, 0.5, None, 5000),
    ],
)
def test_cache_size(
    max_total_tokens: int | None, fraction: float, available: int | None, expected: int
) -> None:
    size = choose_cache_size(
        100,
        wanted=1000,
        max_total_tokens=max_total_tokens,
        mem_fraction=fraction,
        available=available,
    )
    assert size == expected


@pytest.mark.parametrize(
    ("max_total_tokens", "fraction", "message"),
    [
        (401, 0.5, "401 tokens takes 40100 bytes .100 a token.; 40000 are free, enough for 400"),
        (None, 0.001, "40000 bytes are free, of which it may take 0.001; a token takes 100"),
    ],
)
def test_a_cache_that_does_not_fit_is_refused(
    max_total_tokens: int | None, fraction: float, message: str
) -> None:
    with pytest.raises(RequestError, match=message):
        choose_cache_size(
            100,
            wanted=1000,
            max_total_tokens=max_total_tokens,
            mem_fraction=fraction,
            available=40_000,
        )
