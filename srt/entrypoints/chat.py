"""`srt chat`: a conversation in the terminal."""

import argparse
import sys
from typing import TYPE_CHECKING, Any

from srt.entrypoints.options import (
    add_engine_options,
    make_engine,
)
from srt.entrypoints.sampling_options import (
    add_sampling_options,
    add_template_option,
    make_sampling_params,
    read_template_kwargs,
)
from srt.errors import RequestError
from srt.utils.text_streams import read_argument

if TYPE_CHECKING:
    from srt.entrypoints.engine import Engine
    from srt.sampling.sampling_params import SamplingParams

_HELP = "/reset starts a new conversation, /exit or Ctrl-D ends, Ctrl-C stops an answer"


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model",
        description=f"A conversation, one message a line from stdin. {_HELP}.",
    )
    add_engine_options(parser)
    parser.add_argument("--system", metavar="TEXT", help="system message of every conversation")
    add_template_option(parser)
    add_sampling_options(parser)
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    params = make_sampling_params(args)
    template_kwargs = read_template_kwargs(args)
    with make_engine(args, max_running_requests=1, template_needed_by="srt chat") as engine:
        interactive = sys.stdin.isatty()
        if interactive and not args.quiet:
            print(f"{_HELP}.", file=sys.stderr)
        beginning = []
        if args.system is not None:
            system = read_argument("--system", args.system)
            beginning = [{"role": "system", "content": system}]
        conversation = list(beginning)
        while True:
            text = _read_message(interactive)
            if text is None or text == "/exit":
                return 0
            if text == "/reset":
                conversation = list(beginning)
            elif text.startswith("/"):
                print(f"unknown command {text.split()[0]}; {_HELP}", file=sys.stderr)
            elif text:
                conversation.append({"role": "user", "content": text})
                _answer(engine, conversation, params, template_kwargs, interactive)


def _read_message(interactive: bool) -> str | None:
    """The next line, stripped; None at the end of the input. Ctrl-C drops a line that is being
    typed.
    """
    while True:
        try:
            if interactive:
                return input("> ").strip()
            line = sys.stdin.readline()
            return line.strip() if line else None
        except EOFError:
            print()
            return None
        except KeyboardInterrupt:
            if not interactive:
                raise
            print()


def _answer(
    engine: "Engine",
    conversation: list[dict[str, str]],
    params: "SamplingParams",
    template_kwargs: dict[str, Any] | None,
    interactive: bool,
) -> None:
    """Writes the answer as it comes and adds it, or what Ctrl-C left of it, to the conversation."""
    text = ""
    try:
        chunks = engine.generate(
            messages=conversation,
            sampling_params=params,
            chat_template_kwargs=template_kwargs,
            stream=True,
        )
    except RequestError as error:
        if not interactive:
            raise
        # The conversation has outgrown the context: the last message is dropped, the user may
        # /reset.
        conversation.pop()
        print(f"srt: error: {error}", file=sys.stderr)
        return
    try:
        for chunk in chunks:
            text += chunk.text
            sys.stdout.write(chunk.text)
            sys.stdout.flush()
    except KeyboardInterrupt:
        if not interactive:
            raise
        chunks.close()
    print(flush=True)
    conversation.append({"role": "assistant", "content": text})
