"""Where tables are printed."""

import sys

from rich.console import Console

# Wider than any table: without a terminal nothing has to fit into a line, and what reads the lines
# wants them whole.
_UNLIMITED = 10_000


def make_console(*, stderr: bool = False) -> Console:
    """A console for stdout or stderr; as wide as the terminal, or unlimited where it is none."""
    stream = sys.stderr if stderr else sys.stdout
    width = None if stream.isatty() else _UNLIMITED
    return Console(stderr=stderr, highlight=False, width=width)
