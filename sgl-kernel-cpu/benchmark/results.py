"""What a run found, as it is printed, plotted, written to JSON and compared."""

from dataclasses import dataclass

from limits import Limits
from method import Timing
from shapes import Shape

REFERENCE = "fp8 per-tensor"
BATCHED_REFERENCE = "fp8 bmm"


@dataclass(frozen=True)
class Result:
    """One method at one shape and row count; ``median`` in seconds, ``spread`` a fraction of it.

    ``efficiency`` is the roofline's time over the median; ``time_vs_ours`` the median over the
    rounds of this method's time over that of our per-tensor op.
    """

    shape: str
    method: str
    ours: bool
    batch: int
    m: int
    n: int
    k: int
    threads: int
    rounds: int
    median: float
    spread: float
    gbytes_per_s: float
    gflops: float
    efficiency: float
    time_vs_ours: float

    def key(self) -> tuple[str, str, int, int]:
        """What is the same measurement in another run."""
        return (self.shape, self.method, self.m, self.threads)


def make_results(timings: list[Timing], shape: Shape, m: int, limits: Limits) -> list[Result]:
    """Set what was timed against the limits that were sampled with it."""
    reference = BATCHED_REFERENCE if shape.batch else REFERENCE
    base = next(t for t in timings if t.method.name == reference)
    flops = 2.0 * m * shape.n * shape.k * max(1, shape.batch)
    results = []
    for timing in timings:
        method, median = timing.method, timing.median
        moved = method.bytes_moved(m, shape)
        results.append(
            Result(
                shape.label,
                method.name,
                method.ours,
                shape.batch,
                m,
                shape.n,
                shape.k,
                limits.threads,
                len(timing.seconds),
                median,
                timing.spread,
                moved / median / 1e9,
                flops / median / 1e9,
                limits.seconds(moved, flops, method.dtype) / median,
                timing.ratio(base),
            )
        )
    return results
