"""The command `srt`.

Each command is a module of this package with `add_parser(subparsers)`; its `func(args)` returns the
exit status. What a user can put right (SrtError) ends with one line on stderr and status 2, a
signal with status 128 + its number (`srt.utils.signals`).
"""

import argparse
import errno
import logging
import sys
from collections.abc import Sequence

from srt.cli import bench, bench_serve, chat, env, generate, inspect, perplexity, quantize, serve
from srt.control_characters import escape_controls
from srt.errors import SrtError
from srt.utils.signals import Signals, end_line
from srt.utils.text_streams import abandon_stdout, prepare_streams
from srt.version import __version__

STATUS_ERROR = 2
STATUS_INTERRUPTED = 130
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EFBIG, errno.EIO)


def make_parser() -> argparse.ArgumentParser:
    """The parser of the whole command line."""
    parser = argparse.ArgumentParser(
        prog="srt", description="Runs FP8 checkpoints as they are, on any CPU."
    )
    parser.add_argument("--version", action="version", version=f"srt {__version__}")
    parser.add_argument(
        "--debug", action="store_true", help="show the traceback of errors and more of the log"
    )
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for command in (generate, chat, serve, bench, bench_serve, inspect, quantize, perplexity, env):
        command.add_parser(subparsers)
    for subparser in subparsers.choices.values():
        # Accepted after the command too; suppressed so that its default does not undo the one
        # before.
        subparser.add_argument(
            "--debug", action="store_true", default=argparse.SUPPRESS, help=argparse.SUPPRESS
        )
    return parser


def _join_words(argv: Sequence[str]) -> list[str]:
    """`bench serve` is one command, and one word of the command line for the parser."""
    words = list(argv)
    place = next((at for at, word in enumerate(words) if not word.startswith("-")), len(words))
    if words[place : place + 2] == ["bench", "serve"]:
        words[place : place + 2] = ["bench serve"]
    return words


class _LogFormatter(logging.Formatter):
    """Control characters, which a checkpoint's files may hold, become escapes."""

    def format(self, record: logging.LogRecord) -> str:
        return escape_controls(super().format(record), keep="\n\t")


def main(argv: Sequence[str] | None = None, signals: Signals | None = None) -> int:
    """Runs one command.

    Args:
        argv: Its arguments; None for the process's.
        signals: The process's signals, installed; None leaves them as they are.

    Returns:
        The process's exit status.
    """
    args = make_parser().parse_args(_join_words(sys.argv[1:] if argv is None else argv))
    args.signals = Signals() if signals is None else signals
    log = logging.StreamHandler()
    log.setFormatter(_LogFormatter("%(name)s: %(message)s"))
    logging.basicConfig(level=logging.INFO if args.debug else logging.WARNING, handlers=[log])
    try:
        prepare_streams()
        with args.signals.working():
            status: int = args.func(args)
            sys.stdout.flush()
        return status
    except SrtError as error:
        if args.debug:
            raise
        print(f"srt: error: {error}", file=sys.stderr)
        return STATUS_ERROR
    except KeyboardInterrupt:
        end_line()
        return STATUS_INTERRUPTED
    except BrokenPipeError:
        # The reader has left (`srt ... | head`).
        abandon_stdout()
        return 1
    except OSError as error:
        # Streams have no file name, so this is none of the files that commands read and write.
        if error.filename is not None or error.errno not in _FULL:
            raise
        print(f"srt: error: cannot write the output: {error.strerror}", file=sys.stderr)
        abandon_stdout()
        return STATUS_ERROR
