"""Tables on a terminal or in a file."""

from collections.abc import Sequence

from rich.console import Console
from rich.table import Table


def make_console() -> Console:
    """Wide enough for the tables where the output is no terminal."""
    console = Console()
    return console if console.is_terminal else Console(width=120)


def table_of(title: str, columns: Sequence[str], rows: Sequence[Sequence[str]]) -> Table:
    """A table with the first column to the left and the others to the right."""
    table = Table(title=title, title_justify="left")
    for index, column in enumerate(columns):
        table.add_column(column, justify="left" if index == 0 else "right", no_wrap=True)
    for row in rows:
        table.add_row(*row)
    return table
