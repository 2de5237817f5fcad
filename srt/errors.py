"""Errors that a user can act on.

The command line prints their message on one line and exits with status 2; every other exception is
a bug and keeps its traceback.
"""

from pathlib import Path

from srt.control_characters import escape_controls
from srt.values import describe

# Longest message: what a hostile file holds may be quoted in it.
_MAX_MESSAGE = 2000
_MAX_FIELD = 500


class SrtError(Exception):
    """A problem with what the user gave: a file, a flag, a request. Its text is one line, without
    control characters, which a file that it quotes may hold.
    """

    def __str__(self) -> str:
        text = escape_controls(" ".join(super().__str__().splitlines()))
        return text if len(text) <= _MAX_MESSAGE else f"{text[:_MAX_MESSAGE]} ..."


class UnsupportedConfigError(SrtError):
    """The checkpoint asks for a scheme, architecture or option that this runtime does not run."""


class KernelVersionError(SrtError, ImportError):
    """The kernel package is absent or has a version that this srt does not work with."""


class HubError(SrtError):
    """A model on the Hugging Face Hub cannot be had: not there, not allowed, or not reachable."""


class CheckpointError(SrtError):
    """A checkpoint's files contradict each other or the model they are meant for.

    Attributes:
        file: File in which the problem lies, or the one that mentions it.
        tensor: Name of the tensor as the checkpoint spells it, if one is concerned.
        expected: What a sound checkpoint would hold there.
        found: What is there.
    """

    def __init__(
        self,
        problem: str,
        *,
        file: str | Path | None = None,
        tensor: str | None = None,
        expected: object = None,
        found: object = None,
    ) -> None:
        self.file = None if file is None else Path(file)
        self.tensor = tensor
        self.expected = expected
        self.found = found
        fields = [
            ("file", self.file),
            ("tensor", tensor),
            ("expected", expected),
            ("found", found),
        ]
        details = "; ".join(f"{name}: {_cut(value)}" for name, value in fields if value is not None)
        super().__init__(f"{problem} ({details})" if details else problem)


def _cut(value: object) -> str:
    text = str(value)
    return text if len(text) <= _MAX_FIELD else f"{text[:_MAX_FIELD]} ..."


class RequestError(SrtError, ValueError):
    """A request cannot be served as it stands: a bad sampling parameter, or a prompt that does not
    fit.
    """


class OptionError(SrtError, ValueError):
    """An option of the engine has a value that it cannot have.

    Attributes:
        option: Its name; on the command line its flag.
        expected: What it takes, in words.
        found: The value.
    """

    def __init__(self, option: str, expected: str, found: object) -> None:
        self.option = option
        self.expected = expected
        self.found = found
        super().__init__(f"{option}: expected {expected}, found {describe(found)}")

    def __reduce__(self) -> tuple[type["OptionError"], tuple[str, str, object]]:
        # An exception is unpickled from its message alone, which is not what makes this one.
        return type(self), (self.option, self.expected, self.found)


class EngineStateError(SrtError, RuntimeError):
    """The engine cannot do this now: it is shut down, in use by another thread, or loaded before a
    fork.
    """
