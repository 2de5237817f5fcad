"""The files of a checkpoint that is quantized, and whether they stay the same meanwhile."""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

from srt.checkpoint.checkpoint import Checkpoint
from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.files import check_regular
from srt.checkpoint.fingerprint import identify_files
from srt.errors import CheckpointError
from srt.utils.directory_replacement import MANIFEST_FILE

logger = logging.getLogger(__name__)

# What belongs to a model besides its weights: configuration, tokenizer, chat template, license.
_COPIED = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken", "LICENSE*", "NOTICE*")


@dataclass(frozen=True)
class SourceSnapshot:
    """What the source was before anything of it was read.

    Attributes:
        source: the directory.
        copied: files that go into the result as they are.
        files: these, configuration, index and weights.
        identity: what tells whether they are still the same.
    """

    source: Path
    copied: tuple[Path, ...]
    files: tuple[Path, ...]
    identity: dict[str, list[int | str]]

    @classmethod
    def take(cls, source: Path) -> SourceSnapshot:
        """What `source` is now.

        Raises:
            CheckpointError: It holds no weights, or a file that would be copied cannot be read.
        """
        weights = Checkpoint.open(source).files
        copied = _find_copied(source)
        beside = {*_matching(source, ("*.json",)), *copied} - set(weights)
        files = (*weights, *sorted(beside))
        return cls(source, copied, files, identify_files(files))

    @property
    def copied_bytes(self) -> int:
        """Size of `copied`."""
        return sum(file.stat().st_size for file in self.copied)

    def warn_of_directories(self) -> None:
        """Logs what of a model is not copied: directories, such as those of further templates."""
        names = sorted(path.name for path in self.source.iterdir() if path.is_dir())
        left = [name for name in names if not name.startswith(".")]
        if left:
            logger.warning("directories of %s are not copied: %s", self.source, ", ".join(left))

    def check(self) -> None:
        """Raises CheckpointError if the source is not what it was."""
        try:
            after = SourceSnapshot.take(self.source).identity
        except (CheckpointError, OSError):
            after = {}
        changed = [
            name
            for name in sorted({*self.identity, *after})
            if self.identity.get(name) != after.get(name)
        ]
        if changed:
            raise CheckpointError(
                "the source has changed while it was read",
                file=self.source,
                expected="the same files before and after",
                found=f"another {', '.join(changed[:5])}",
            )


def _find_copied(source: Path) -> tuple[Path, ...]:
    """Configuration, tokenizer and the like, without what this program writes itself."""
    written = (CONFIG_FILE, MANIFEST_FILE)
    return tuple(
        file
        for file in _matching(source, _COPIED)
        if file.name not in written and not file.name.endswith(".index.json")
    )


def _matching(directory: Path, patterns: Iterable[str]) -> list[Path]:
    """Files by their names. Raises CheckpointError for a link to nothing, a pipe and the like: the
    result would lack them.
    """
    found = {path for pattern in patterns for path in directory.glob(pattern) if not path.is_dir()}
    for file in found:
        check_regular(file)
    return sorted(found)
