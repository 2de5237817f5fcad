"""`srt chat`: a conversation in the terminal."""

import argparse
import sys
from contextlib import closing

from srt.chat.conversation import COMMANDS, Conversation, parse_command, unescape
from srt.chat.message_reader import (
    KEYS,
    LineReader,
    MessageReader,
    TerminalReader,
    history_file,
    is_terminal,
)
from srt.cli.options import add_engine_options, make_config, make_engine
from srt.cli.sampling_options import (
    add_sampling_options,
    add_template_option,
    make_sampling_params,
    read_template_kwargs,
)
from srt.errors import RequestError, SrtError
from srt.utils.text_streams import read_argument, write_answer


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "chat",
        help="talk to a model",
        description="A conversation in the terminal, or with the lines of stdin as messages. "
        f"Commands: {', '.join(COMMANDS)}. {KEYS}.",
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
    system = None if args.system is None else read_argument("--system", args.system)
    config = make_config(args, max_running_requests=1, template_needed_by="srt chat")
    interactive = is_terminal()
    if interactive and args.progress:
        _say(f"loading {args.model_path} ...")
    with make_engine(args, config) as engine:
        if interactive:
            reader: MessageReader = TerminalReader(history_file())
            if args.progress:
                _say("/help shows commands and keys, Ctrl-D ends.")
        else:
            reader = LineReader()
        conversation = Conversation(engine, params, template_kwargs, system)
        while True:
            try:
                text = reader.read()
                if text is None or text == "/exit":
                    return 0
                if text:
                    _take(conversation, text, interactive)
            except KeyboardInterrupt:
                if not interactive:
                    raise
                args.signals.handled()


def _take(conversation: Conversation, text: str, interactive: bool) -> None:
    """Runs a command, or answers a message."""
    command = parse_command(text)
    try:
        if command is not None:
            _run_command(conversation, *command)
        else:
            _answer(conversation, unescape(text))
    except SrtError as error:
        if not interactive and command is None:
            raise
        # The conversation has outgrown the context, or this answer failed: a person may go on.
        _say(f"srt: error: {error}")


def _answer(conversation: Conversation, text: str) -> None:
    """Writes the answer as it comes."""
    written = False
    try:
        with closing(conversation.answer(text)) as pieces:
            for piece in pieces:
                written = True
                write_answer(piece)
    finally:
        if written:
            print(flush=True)


def _run_command(conversation: Conversation, command: str, argument: str) -> None:
    if command not in COMMANDS:
        raise RequestError(
            f"unknown command {command}; /help lists them, and //{command[1:]} sends it as a "
            "message"
        )
    if command == "/save" and not argument:
        raise RequestError("/save: expected the name of a file")
    if argument and command not in ("/save", "/system"):
        raise RequestError(f"{command} takes no argument; found {argument!r}")
    if command == "/help":
        for name, text in COMMANDS.items():
            _say(f"{name:8} {text}")
        _say(f"A message that begins with / is written with //, unless a path follows.\n{KEYS}.")
    elif command == "/reset":
        conversation.turns = []
    elif command == "/stats":
        _say(conversation.stats())
    elif command == "/save":
        conversation.save(argument)
        _say(f"saved {len(conversation.messages)} messages to {argument}")
    elif argument:
        conversation.system = argument
    else:
        _say(conversation.system or "no system message")


def _say(text: str) -> None:
    """Writes to stderr what is no answer."""
    print(text, file=sys.stderr)
