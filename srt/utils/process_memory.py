"""Memory of this process."""

import resource
import sys


def peak_rss() -> int:
    """Largest resident memory that this process has had, in bytes."""
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak if sys.platform == "darwin" else peak * 1024
