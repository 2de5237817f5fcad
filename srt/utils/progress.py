"""Progress bars for people."""

import sys
from typing import Any

from tqdm import tqdm


def byte_bar(total: int, description: str, *, enabled: bool) -> "tqdm[Any]":
    """A bar over `total` bytes on stderr, if `enabled` and that is a terminal; a context manager.

    Nothing of it stays when it ends.
    """
    return tqdm(
        total=total,
        desc=description,
        unit="B",
        unit_scale=True,
        file=sys.stderr,
        leave=False,
        disable=not (enabled and sys.stderr.isatty()),
    )
