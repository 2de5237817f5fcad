"""`srt bench serve`: what it makes of known answers at known times, and of a live server."""

import asyncio
import json
import math
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from srt.bench.serving.benchmark import run_benchmark
from srt.bench.serving.contenders import Contender, HttpServer, Progress
from srt.bench.serving.dataset import BenchRequest, FileDataset, RandomDataset
from srt.bench.serving.http_client import RawAnswer
from srt.bench.serving.load import Load, run_load
from srt.bench.serving.statistics import percentile, summarize
from srt.bench.serving.timings import Timing, read_answer
from srt.cli.main import main
from srt.errors import RequestError, SrtError
from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import live_server
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, write_checkpoint
from srt.test.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

register_cpu_ci(est_time=14, suite="per-commit")

ASKED = BenchRequest([1, 2, 3], 3, exact=True)


def chunk(text: str | None, **others: Any) -> bytes:
    choices = [] if text is None else [{"index": 0, "text": text}]
    return b"data: " + json.dumps({"choices": choices, **others}).encode()


USAGE = {"prompt_tokens": 3, "completion_tokens": 3}
WHOLE = [chunk("a"), chunk("b"), chunk("c"), chunk(None, usage=USAGE), b"data: [DONE]"]


def raw(events: list[bytes], status: int = 200, problem: str | None = None) -> RawAnswer:
    times = [(10.0 + place, event) for place, event in enumerate(events)]
    return RawAnswer(9.5, status, times, b"", 20.0, problem)


def test_times_of_an_answer() -> None:
    # The event without text is no token.
    timing = read_answer(raw([chunk(""), *WHOLE]), ASKED)
    assert timing.failure is None
    assert (timing.ttft, timing.e2e, timing.tpot, timing.itl) == (1.5, 3.5, 1.0, [1.0, 1.0])
    assert (timing.prompt_tokens, timing.output_tokens) == (3, 3)


def test_times_of_chat_with_reasoning() -> None:
    deltas: list[dict[str, Any]] = [
        {"role": "assistant", "content": ""},
        {"reasoning_content": "hm"},
        {"content": "a"},
    ]
    events = [b"data: " + json.dumps({"choices": [{"delta": d}]}).encode() for d in deltas]
    timing = read_answer(raw([b": ping", *events, *WHOLE[3:]]), ASKED)
    assert timing.arrivals == (12.0, 13.0)


@pytest.mark.parametrize(
    ("answer", "kind"),
    [
        (raw([], 429), "http 429"),
        (raw([], 0, "connect"), "connect"),
        (raw(WHOLE[:2], 200, "disconnect"), "disconnect"),
        (raw(WHOLE[:2], 200, "timeout"), "timeout"),
        (raw(WHOLE[:4]), "truncated"),
        (raw([*WHOLE[:3], WHOLE[4]]), "no usage"),
        (raw(WHOLE[3:]), "empty"),
        (raw([WHOLE[0], chunk(None, usage=USAGE | {"completion_tokens": 2}), WHOLE[4]]), "length"),
        (raw([WHOLE[0], b'data: {"error": {"message": "x"}}', WHOLE[4]]), "error"),
        (raw([b"data: {", *WHOLE]), "malformed"),
        (raw([b"data: 3", *WHOLE]), "malformed"),
    ],
)
def test_what_is_not_sound_is_a_failure(answer: RawAnswer, kind: str) -> None:
    assert read_answer(answer, ASKED).failure == kind


def test_an_answer_may_end_early_where_that_is_allowed() -> None:
    events = [WHOLE[0], chunk(None, usage=USAGE | {"completion_tokens": 1}), WHOLE[4]]
    timing = read_answer(raw(events), BenchRequest("a", 3, exact=False))
    assert timing.failure is None and timing.tpot is None


@pytest.mark.parametrize("share", [0, 37.5, 50, 90, 99, 100])
def test_percentiles_are_numpys(share: float) -> None:
    values = [0.4, 3.0, 1.0, 8.5, 2.25, 2.25, 0.125]
    assert percentile(values, share) == pytest.approx(np.percentile(values, share), rel=1e-12)
    assert percentile([7.0], share) == 7.0


def test_summary() -> None:
    good = [Timing(0.0, 4.0, (1.0, 2.0, 4.0), 5, 3), Timing(1.0, 5.0, (1.5, 5.0), 5, 2)]
    bad = [Timing(0.0, 8.0, failure="timeout"), Timing(0.0, 1.0, failure="http 429")]
    result = summarize([*good, *bad], {"ttft": 0.5, "e2e": 4.0})
    assert result["seconds"] == 8.0
    assert result["completed"] == 2
    assert result["failures"] == {"timeout": 1, "http 429": 1}
    assert result["output_tokens_per_second"] == 5 / 8
    assert result["tokens_per_second"] == 15 / 8
    assert result["goodput"] == 1 / 8  # the second; the first waited longer for its first token
    assert result["ttft"]["p50"] == 0.75
    assert result["tpot"]["max"] == 3.5
    assert result["itl"]["p50"] == 2.0
    nothing = summarize(bad, {})
    assert nothing["ttft"]["p50"] is None and nothing["goodput"] is None


def test_concurrency_is_kept() -> None:
    async def run() -> int:
        now, most = 0, 0

        async def send(item: int) -> int:
            nonlocal now, most
            now += 1
            most = max(most, now)
            for _ in range(3):
                await asyncio.sleep(0)
            now -= 1
            return item

        assert await run_load(Load(concurrency=3), list(range(10)), send, "") == list(range(10))
        return most

    assert asyncio.run(run()) == 3


def test_arrivals_are_a_poisson_process() -> None:
    times = Load(rate=50.0).arrivals(4000, "seed")
    gaps = np.diff(times)
    assert times == Load(rate=50.0).arrivals(4000, "seed") and times[0] == 0
    assert times != Load(rate=50.0).arrivals(4000, "other")
    # Mean and standard deviation of an exponential distribution are the same; 5 standard errors.
    assert gaps.mean() == pytest.approx(0.02, rel=5 / math.sqrt(4000))
    assert gaps.std() == pytest.approx(0.02, rel=0.16)
    assert Load().arrivals(3, "") == [0.0, 0.0, 0.0]


def test_requests_wait_for_their_time() -> None:
    waits = []

    async def sleep(seconds: float) -> None:
        waits.append(seconds)

    async def send(item: int) -> int:
        return item

    asyncio.run(run_load(Load(rate=0.5), [1, 2, 3], send, "seed", sleep=sleep))
    due = Load(rate=0.5).arrivals(3, "seed")[1:]
    assert waits == pytest.approx(due, abs=0.5)


def test_random_prompts() -> None:
    dataset = RandomDataset((3, 6), (2, 4), (10, 20), prefix_len=5, prefixes=2)
    requests = dataset.draw(40, "a")
    assert requests == dataset.draw(40, "a") != dataset.draw(40, "b")
    prompts = [request.prompt for request in requests]
    assert {len(prompt) for prompt in prompts} == {8, 9, 10, 11}
    assert {request.output_len for request in requests} == {2, 3, 4}
    assert {tuple(prompt[:5]) for prompt in prompts[::2]} == {tuple(prompts[0][:5])}
    assert prompts[0][:5] != prompts[1][:5]
    assert all(10 <= token < 20 for prompt in prompts for token in prompt)  # type: ignore[operator]


def test_prompts_of_a_file(tmp_path: Path) -> None:
    file = tmp_path / "prompts.jsonl"
    file.write_text(
        '{"prompt": "a"}\n{"prompt": [1, 2], "max_tokens": 7}\n{"messages": [{"role": "user"}]}\n'
    )
    requests = FileDataset.read(file, 5, True).requests
    assert [request.output_len for request in requests] == [5, 7, 5]
    drawn = FileDataset(requests).draw(5, "a")
    assert len(drawn) == 5 and {r.output_len for r in drawn} == {5, 7}
    file.write_text('[{"conversations": [{"from": "human", "value": "hi"}]}]')
    assert FileDataset.read(file, 5, True).requests[0].prompt == "hi"


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("{", "not JSON"),
        ("", "expected prompts"),
        ('{"text": "a"}', "file:1: expected an object"),
        ('{"prompt": "a", "max_tokens": 0}', "max_tokens: expected 1 or more, found 0"),
    ],
)
def test_files_that_are_none(tmp_path: Path, text: str, message: str) -> None:
    file = tmp_path / "file"
    file.write_text(text)
    with pytest.raises(RequestError, match=message):
        FileDataset.read(file, 5, True)


class _Known(Contender):
    """Each token takes `step` seconds."""

    def __init__(self, name: str, step: float) -> None:
        self.name, self.step = name, step
        self.asked: list[tuple[str, list[BenchRequest]]] = []

    def run(self, load: Load, requests: Any, seed: str, progress: Progress) -> list[Timing]:
        self.asked.append((seed, list(requests)))
        for _ in requests:
            progress()
        arrivals = tuple(self.step * place for place in (1, 2))
        return [Timing(0.0, arrivals[-1], arrivals, 3, 2) for _ in requests]


def test_contenders_take_turns_and_get_the_same() -> None:
    fast, slow, count = _Known("fast", 0.5), _Known("slow", 1.0), 0

    def progress() -> None:
        nonlocal count
        count += 1

    rows = run_benchmark(
        [fast, slow],
        RandomDataset((3, 3), (2, 2)),
        [Load(concurrency=1), Load(rate=2.0)],
        num_prompts=4,
        warmup=1,
        rounds=3,
        seed=0,
        goodput={},
        progress=progress,
    )
    assert count == 2 * (1 + 2 * 3 * 4)
    assert fast.asked == slow.asked
    assert len({seed for seed, _ in fast.asked}) == 1 + 2 * 3
    # No two rounds ask for the same.
    assert len({str(requests) for _, requests in fast.asked}) == 1 + 2 * 3
    assert [(row["contender"], row["ratio"]) for row in rows] == [("fast", 1), ("slow", 0.5)] * 2
    assert rows[1]["output_tokens_per_second"] == 4.0 and rows[1]["ttft_p50"] == 1.0


class _Script(BaseHTTPRequestHandler):
    """Answers by what the prompt's first token says."""

    protocol_version = "HTTP/1.1"

    def log_message(self, *_: object) -> None:
        """Says nothing."""

    def do_GET(self) -> None:
        self._whole(200, b'{"data": [{"id": "scripted"}]}')

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        assert body["model"] == "scripted" and body["stream"] and body["ignore_eos"]
        assert self.headers["Authorization"] == "Bearer key"
        what = body["prompt"][0]
        if what == 1:
            self._whole(429, b"{}")
            return
        self.send_response(200)
        self.send_header("Transfer-Encoding", "chunked")
        self.end_headers()
        stream = b"\n\n".join(WHOLE) + b"\n\n"
        # Cut where no event ends.
        for place in range(0, len(stream), 7):
            self._chunk(stream[place : place + 7])
            if what == 2 and place > 60:
                self.close_connection = True
                return
        self._chunk(b"")

    def _chunk(self, data: bytes) -> None:
        self.wfile.write(b"%x\r\n%s\r\n" % (len(data), data))

    def _whole(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)


@contextmanager
def scripted_server() -> Iterator[str]:
    server = ThreadingHTTPServer(("127.0.0.1", 0), _Script)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()


def connect(url: str, timeout: float = 20.0, model: str | None = None) -> HttpServer:
    return HttpServer(
        "s", url, model=model, key="key", endpoint="completions", body={}, timeout=timeout
    )


def test_bytes_of_a_server() -> None:
    with scripted_server() as url:
        server = connect(url + "/v1")
        prompts = [[0], [1], [0], [2], [0]]
        requests = [BenchRequest(prompt, 3, exact=True) for prompt in prompts]
        timings = server.run(Load(concurrency=1), requests, "", lambda: None)
    assert [t.failure for t in timings] == [None, "http 429", None, "disconnect", None]
    assert [len(t.arrivals) for t in timings] == [3, 0, 3, 0, 3]
    assert all(t.started <= t.ended for t in timings)
    # Nobody listens any more.
    (timing,) = connect(url, model="scripted").run(Load(), requests[:1], "", lambda: None)
    assert timing.failure == "connect"
    with pytest.raises(SrtError, match=r"does not say its model \(connect\)"):
        connect(url)


def test_endpoints_and_prompts_that_do_not_fit() -> None:
    server = HttpServer(
        "s", "http://x", model="m", key=None, endpoint="chat", body={"top_p": 0.5}, timeout=1
    )
    path, body = server.encode(BenchRequest("hi", 3, exact=False))
    assert path == "/v1/chat/completions"
    assert json.loads(body)["messages"] == [{"role": "user", "content": "hi"}]
    assert json.loads(body)["top_p"] == 0.5 and "ignore_eos" not in json.loads(body)
    with pytest.raises(RequestError, match="found token ids"):
        server.encode(ASKED)


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ("", "one of --base-url and --serve"),
        ("--base-url http://x --serve m", "one of --base-url and --serve"),
        ("--base-url http://x --offline", "expected --serve"),
        ("--base-url x --model m", "begins with http"),
        ("--base-url http://x --num-prompts 0", ">= 1"),
        ("--base-url http://x --input-len 1 2 3", "fewest and most"),
        ("--base-url http://x --request-rate 0", "more than 0"),
        ("--base-url http://x --token-ids 5 5", "FROM < TO"),
        ("--base-url http://x --goodput itl:3", "--goodput itl:3"),
        ("--base-url http://x --extra-body [] ", "expected an object"),
        ("--base-url http://x --endpoint chat", "expected --dataset-file"),
        ("--base-url http://x --model m --api-key-env NO_SUCH_KEY", "NO_SUCH_KEY is not set"),
        ("--base-url http://x --model m --peer x", "NAME=URL"),
    ],
)
def test_options_that_are_wrong(
    options: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["bench", "serve", *options.split()]) == 2
    assert message in capsys.readouterr().err


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("bench") / "tiny"
    config = TINY_CONFIG | {"vocab_size": VOCAB_SIZE}
    write_checkpoint(directory, config, make_tensors(config))
    write_tokenizer(directory)
    return directory


def documented_keys() -> set[str]:
    page = (Path(__file__).parents[3] / "docs" / "json.md").read_text()
    text = page.partition("\n## srt bench serve\n")[2].partition("\n## ")[0]
    assert text
    cells = [line.split("|")[1] for line in text.splitlines() if line.startswith("| `")]
    return {key.strip("` ") for cell in cells for key in cell.split(",")}


def keys_of(value: Any, prefix: str = "") -> Iterator[str]:
    if isinstance(value, dict):
        for key, inner in value.items():
            yield prefix + key
            yield from keys_of(inner, f"{prefix}{key}.")
    elif isinstance(value, list):
        for inner in value:
            yield from keys_of(inner, f"{prefix.removesuffix('.')}[].")


def test_a_live_server_and_an_engine_in_turns(
    model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    picture = tmp_path / "a.svg"
    with live_server(model, ["--threads", "1"]) as peer:
        status = main(
            [
                *("bench", "serve", "--serve", str(model), "--serve-options", "--threads 1"),
                *("--offline", "--peer", f"other={peer.url}/v1", "--model", "tiny", "--json"),
                *("--input-len", "4", "8", "--output-len", "4", "--token-ids", "5", "9"),
                *("--concurrency", "1", "2", "--num-prompts", "3", "--warmup", "1"),
                *("--goodput", "e2e:60000", "--plot", str(picture)),
            ]
        )
    printed = json.loads(capsys.readouterr().out)
    assert status == 0, printed
    rows = printed["results"]
    names = ["engine in process", "srt serve", "other"]
    assert [row["contender"] for row in rows] == names * 2
    for row in rows:
        (run,) = row["runs"]
        assert run["output_tokens"] == 12 and row["failed"] == 0
        assert 0 < run["ttft"]["p50"] <= run["e2e"]["p50"] < run["seconds"]
        assert run["goodput"] == pytest.approx(run["requests_per_second"])
    # The same requests: the servers count the same prompts.
    assert len({row["runs"][0]["prompt_tokens"] for row in rows[:3]}) == 1
    assert "<svg" in picture.read_text()
    keys = {key for key in keys_of(printed) if not key.startswith("results[].runs[].failures.")}
    assert keys - {"goodput_limits.e2e"} == documented_keys() - {"goodput_limits.*"}
