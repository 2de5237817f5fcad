"""`srt bench serve`: how fast a server answers, ours or another, in the same run."""

import argparse
import json
import math
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srt.bench.plot_file import check_plot_file
from srt.errors import RequestError, SrtError
from srt.utils.kernels import load_kernels

if TYPE_CHECKING:
    from srt.bench.serving.contenders import Contender
    from srt.bench.serving.dataset import FileDataset, RandomDataset

_GOODPUT = ("ttft", "tpot", "e2e")


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "bench serve",
        help="measure how fast a server answers",
        description="Sends requests to a server that speaks OpenAI's API, at a rate or so many at "
        "once, and prints tokens per second and how long answers took. Several servers, and an "
        "engine without one, take turns.",
    )
    servers = parser.add_argument_group("servers")
    servers.add_argument("--base-url", metavar="URL", help="a server that runs, http://host:port")
    servers.add_argument(
        "--serve", metavar="MODEL", help="start a server of this model for the measurement"
    )
    servers.add_argument(
        "--serve-options",
        default="",
        metavar="TEXT",
        help="its options as for srt serve, such as '--threads 2'",
    )
    servers.add_argument(
        "--offline",
        action="store_true",
        help="with --serve: compare with an engine of the same options in this process",
    )
    servers.add_argument(
        "--peer",
        action="append",
        default=[],
        metavar="NAME=URL",
        help="another server that runs, such as llama-server; may be repeated",
    )
    servers.add_argument(
        "--model", metavar="NAME", help="the model's name in requests (default: ask each server)"
    )
    servers.add_argument(
        "--api-key-env", metavar="NAME", help="environment variable with the key for --base-url"
    )
    servers.add_argument(
        "--endpoint",
        choices=("completions", "chat"),
        default="completions",
        help="which API (default: %(default)s)",
    )
    servers.add_argument(
        "--extra-body", default="{}", metavar="JSON", help="further fields of every request"
    )
    servers.add_argument(
        "--timeout", type=float, default=600.0, metavar="SECONDS", help="for an answer"
    )
    _add_workload(parser.add_argument_group("workload"))
    output = parser.add_argument_group("output")
    output.add_argument("--json", action="store_true", help="print one JSON object instead")
    output.add_argument("--quiet", action="store_true", help="no progress bar")
    output.add_argument(
        "--plot", type=Path, metavar="FILE", help="write a picture: .png, .svg or .pdf"
    )
    parser.set_defaults(func=run)


def _add_workload(group: argparse._ArgumentGroup) -> None:
    group.add_argument(
        "--request-rate",
        type=float,
        nargs="+",
        default=[math.inf],
        metavar="R",
        help="requests a second, at random intervals; inf: all at once (default: inf)",
    )
    group.add_argument(
        "--concurrency",
        type=int,
        nargs="+",
        metavar="N",
        help="most requests at a time (default: no limit)",
    )
    group.add_argument(
        "--num-prompts", type=int, default=32, metavar="N", help="requests of a run (default: 32)"
    )
    group.add_argument(
        "--warmup",
        type=int,
        default=2,
        metavar="N",
        help="requests before, which do not count (default: %(default)s)",
    )
    group.add_argument("--rounds", type=int, default=1, metavar="N", help="runs of each server")
    group.add_argument("--seed", type=int, default=0, metavar="N", help="of everything random")
    for name, default, what in (("input", 512, "a prompt"), ("output", 128, "an answer")):
        group.add_argument(
            f"--{name}-len",
            type=int,
            nargs="+",
            default=[default],
            metavar="N",
            help=f"tokens of {what}, or fewest and most of them (default: {default})",
        )
    group.add_argument(
        "--prefix-len",
        type=int,
        default=0,
        metavar="N",
        help="tokens that prompts begin with alike",
    )
    group.add_argument(
        "--prefixes", type=int, default=1, metavar="N", help="how many such beginnings there are"
    )
    group.add_argument(
        "--token-ids",
        type=int,
        nargs=2,
        default=[1000, 20000],
        metavar=("FROM", "TO"),
        help="prompts are drawn from these tokens (default: 1000 20000)",
    )
    group.add_argument(
        "--dataset-file",
        type=Path,
        metavar="FILE",
        help="prompts or messages, a JSON object a line, or ShareGPT's list, instead",
    )
    group.add_argument(
        "--allow-eos",
        action="store_true",
        help="let answers end before --output-len where the model ends them",
    )
    group.add_argument(
        "--goodput",
        nargs="+",
        default=[],
        metavar="METRIC:MS",
        help="also count requests a second within these limits, such as ttft:200 tpot:50",
    )


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    dataset_text, extra, goodput = _check(args)
    with args.signals.importing():
        if args.offline:
            load_kernels()
        try:
            import httptools
        except ImportError as error:
            raise SrtError(
                f"srt bench serve needs httptools ({error}); run: "
                "pip install 'sglang-srt-cpu[serve]'"
            ) from error
        del httptools
        from srt.bench.serving.benchmark import run_benchmark
        from srt.bench.serving.load import Load
        from srt.bench.serving.report import plot, print_table
        from srt.utils.console import make_console
    dataset = _make_dataset(args)
    loads = [
        Load(rate, concurrency)
        for rate in args.request_rate
        for concurrency in (args.concurrency or [None])
    ]
    with ExitStack() as stack:
        contenders, facts = _open_contenders(args, extra, stack)
        total = len(contenders) * (args.warmup + len(loads) * args.rounds * args.num_prompts)
        with _bar(total, enabled=not (args.quiet or args.json)) as progress:
            rows = run_benchmark(
                contenders,
                dataset,
                loads,
                num_prompts=args.num_prompts,
                warmup=args.warmup,
                rounds=args.rounds,
                seed=args.seed,
                goodput=goodput,
                progress=progress,
            )
    facts |= {
        "dataset": dataset_text,
        "endpoint": args.endpoint,
        "num_prompts": args.num_prompts,
        "rounds": args.rounds,
        "seed": args.seed,
        "goodput_limits": goodput,
    }
    if args.json:
        print(json.dumps({**facts, "results": rows}, indent=2))
    else:
        print_table(make_console(), facts, rows)
    if args.plot is not None:
        plot(rows, args.plot)
    return 1 if any(row["failed"] for row in rows) else 0


def _check(args: argparse.Namespace) -> tuple[str, dict[str, Any], dict[str, float]]:
    """Checks the options; returns the workload in words, further fields and limits in seconds."""
    if (args.base_url is None) == (args.serve is None):
        raise RequestError("expected one of --base-url and --serve")
    if args.serve is None and (args.offline or args.serve_options):
        raise RequestError("--offline and --serve-options: expected --serve with them")
    least = [args.num_prompts, args.rounds, args.prefixes, *(args.concurrency or [])]
    lengths = [*args.input_len, *args.output_len]
    if min(*least, *lengths) < 1 or min(args.prefix_len, args.warmup) < 0:
        raise RequestError("expected lengths, counts and concurrency >= 1")
    if len(args.input_len) > 2 or len(args.output_len) > 2:
        raise RequestError("--input-len, --output-len: expected one number, or fewest and most")
    if not all(rate > 0 for rate in args.request_rate) or not args.timeout > 0:
        raise RequestError("--request-rate, --timeout: expected more than 0")
    low, high = args.token_ids
    if not 0 <= low < high:
        raise RequestError(f"--token-ids: expected 0 <= FROM < TO, found {low} {high}")
    if args.plot is not None:
        check_plot_file(args.plot)
    try:
        extra = json.loads(args.extra_body)
    except ValueError as error:
        raise RequestError(f"--extra-body: not JSON: {error}") from error
    if not isinstance(extra, dict):
        raise RequestError("--extra-body: expected an object")
    if args.dataset_file is not None:
        return str(args.dataset_file), extra, _limits(args.goodput)
    if args.endpoint == "chat":
        raise RequestError("--endpoint chat: expected --dataset-file with it")
    words = f"random prompts of {'-'.join(map(str, args.input_len))} tokens"
    if args.prefix_len:
        words += f" after {args.prefix_len} that are alike"
    words += f", answers of {'-'.join(map(str, args.output_len))}"
    return words, extra, _limits(args.goodput)


def _limits(given: list[str]) -> dict[str, float]:
    limits = {}
    for text in given:
        name, _, value = text.partition(":")
        try:
            limits[name] = float(value) / 1e3
        except ValueError:
            name = ""
        if name not in _GOODPUT:
            raise RequestError(
                f"--goodput {text}: expected METRIC:MILLISECONDS, METRIC one of "
                + ", ".join(_GOODPUT)
            )
    return limits


def _make_dataset(args: argparse.Namespace) -> "RandomDataset | FileDataset":
    from srt.bench.serving.dataset import FileDataset, RandomDataset

    if args.dataset_file is not None:
        return FileDataset.read(args.dataset_file, max(args.output_len), not args.allow_eos)
    return RandomDataset(
        (min(args.input_len), max(args.input_len)),
        (min(args.output_len), max(args.output_len)),
        (args.token_ids[0], args.token_ids[1]),
        args.prefix_len,
        args.prefixes,
        exact=not args.allow_eos,
    )


def _open_contenders(
    args: argparse.Namespace, extra: dict[str, Any], stack: ExitStack
) -> tuple[list["Contender"], dict[str, Any]]:
    from srt.bench.serving.contenders import Contender, HttpServer
    from srt.bench.serving.own_server import own_server

    key = None
    if args.api_key_env is not None:
        key = os.environ.get(args.api_key_env)
        if not key:
            raise RequestError(f"--api-key-env: the variable {args.api_key_env} is not set")
    options: dict[str, Any] = {
        "endpoint": args.endpoint,
        "body": extra,
        "timeout": args.timeout,
    }
    contenders: list[Contender] = []
    facts: dict[str, Any] = {"server": args.base_url}
    if args.serve is None:
        first = HttpServer("server", args.base_url, model=args.model, key=key, **options)
    else:
        words = ["--model", args.serve, *shlex.split(args.serve_options)]
        if args.offline:
            contenders.append(_offline(words, stack))
        url, line = stack.enter_context(own_server(words))
        facts["server"] = line
        first = HttpServer("srt serve", url, model=args.model, key=key, **options)
    contenders.append(first)
    for peer in args.peer:
        name, _, url = peer.partition("=")
        if not url or name in [one.name for one in contenders]:
            raise RequestError(f"--peer {peer}: expected NAME=URL, each name once")
        contenders.append(HttpServer(name, url, model=args.model, key=None, **options))
    return contenders, facts


def _offline(words: list[str], stack: ExitStack) -> "Contender":
    """An engine with the options of the server."""
    from srt.bench.serving.offline import OfflineEngine
    from srt.cli import serve
    from srt.cli.options import make_config
    from srt.entrypoints.engine import Engine

    parser = argparse.ArgumentParser(prog="srt bench serve --serve-options")
    serve.add_parser(parser.add_subparsers())
    parsed = parser.parse_args(["serve", *words])
    return OfflineEngine(stack.enter_context(Engine(make_config(parsed, progress=False))))


@contextmanager
def _bar(total: int, *, enabled: bool) -> Iterator[Any]:
    from tqdm import tqdm

    is_shown = enabled and sys.stderr.isatty()
    with tqdm(
        total=total, unit="request", file=sys.stderr, leave=False, disable=not is_shown
    ) as bar:
        yield lambda: bar.update()
