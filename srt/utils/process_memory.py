"""Memory of this process."""

import re
import resource
import sys
from pathlib import Path


def peak_rss() -> int:
    """Largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024


def mapped_rss(status: Path = Path("/proc/self/status")) -> int:
    """Resident bytes of the files that this process maps; 0 where the system does not tell.

    The system counts them as memory that it could get back, but what is in use, such as mapped
    weights, would be read again at once.
    """
    try:
        match = re.search(r"^RssFile:\s+(\d+) kB$", status.read_text(), re.MULTILINE)
    except OSError:
        return 0
    return int(match[1]) * 1024 if match else 0
