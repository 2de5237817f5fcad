"""How OpenMP threads wait between the parallel regions of Torch and the kernels."""

from collections.abc import MutableMapping

# Turns of GNU OpenMP's waiting loop before a thread sleeps: some microseconds, about the pause
# between two operators of a decode step.
_SPIN_COUNT = "1000"
_USER_SETTINGS = ("GOMP_SPINCOUNT", "OMP_WAIT_POLICY")


def limit_spinning(environ: MutableMapping[str, str]) -> None:
    """Lets waiting threads sleep soon, unless the user has set how they wait.

    By default GNU OpenMP spins for milliseconds. On a machine that is busy with anything else, a
    spinning thread takes the core that the thread it waits for needs, and every parallel region
    then costs a time slice of the scheduler: decoding was ten times slower.

    Args:
        environ: The process's environment. Read when Torch loads OpenMP, so this must come first.
    """
    if not any(name in environ for name in _USER_SETTINGS):
        environ["GOMP_SPINCOUNT"] = _SPIN_COUNT
