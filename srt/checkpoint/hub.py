"""Models by name: finds `org/name[@revision]` in the Hugging Face Hub's cache or downloads it.

Only what running needs is fetched: configuration, tokenizer, and the safetensors files that the
index names. Cache, token, proxies and offline mode are huggingface_hub's own: HF_HOME,
`hf auth login` or HF_TOKEN, HF_HUB_OFFLINE
(https://huggingface.co/docs/huggingface_hub/package_reference/environment_variables).

huggingface_hub is imported when a name has to be resolved; local directories do without.
"""

from __future__ import annotations

import glob
import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE, MISTRAL_FILE, MODELOPT_FILE
from srt.checkpoint.files import lies_there
from srt.checkpoint.weight_files import INDEX_FILE, SINGLE_FILE, read_index
from srt.errors import CheckpointError, HubError

# Configuration and tokenizer of a model in Hugging Face's form; a model has some of them.
SMALL_FILES = (
    CONFIG_FILE,
    "generation_config.json",
    MODELOPT_FILE,
    INDEX_FILE,
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "vocab.txt",
    "merges.txt",
    "chat_template.jinja",
    "additional_chat_templates/*.jinja",
    "chat_template.json",
)
# Everything of a model in Mistral's own form.
_MISTRAL_FILES = (
    MISTRAL_FILE,
    "tekken.json",
    "tokenizer.model*",
    "consolidated*.safetensors",
    "consolidated.safetensors.index.json",
)
_NAME = re.compile(r"(?P<repo>[A-Za-z0-9_][\w.-]*/[\w.-]+)(?:@(?P<revision>.+))?")


def resolve_model(model: str | Path, revision: str | None = None, *, progress: bool = True) -> Path:
    """The directory of a checkpoint, downloaded if need be.

    Args:
        model: A directory, or `org/name` or `org/name@revision` on the Hub. An existing path wins.
        revision: Branch, tag or commit on the Hub; None for `main`.
        progress: Show progress bars on stderr if that is a terminal.

    Returns:
        The directory given, or the snapshot in huggingface_hub's cache.

    Raises:
        CheckpointError: `model` is neither an existing path nor a name, or the index is damaged.
        HubError: The Hub has no such model or revision, access to it is restricted, it has no
            safetensors weights, or neither the cache nor the network yields it.
    """
    snapshot = find_model(model, revision, progress=progress)
    if isinstance(snapshot, Path):
        return snapshot
    directory = snapshot.fetch(SMALL_FILES)
    if lies_there(directory / CONFIG_FILE):
        weights = list_weights(directory)
        snapshot.fetch(tuple(glob.escape(name) for name in weights))
        missing = [name for name in weights if not (directory / name).is_file()]
        if missing and lies_there(directory / INDEX_FILE):
            raise snapshot.lacks(missing[0])
        expected = f"{SINGLE_FILE} or {INDEX_FILE}"
    else:
        snapshot.fetch(_MISTRAL_FILES)
        if not lies_there(directory / MISTRAL_FILE):
            raise snapshot.is_no_checkpoint()
        expected = "consolidated*.safetensors"
    if next(directory.glob("*.safetensors"), None) is None:
        raise HubError(f"{snapshot.repo} has no safetensors weights; expected {expected}")
    return directory


def find_model(
    model: str | Path, revision: str | None = None, *, progress: bool = True
) -> Path | HubSnapshot:
    """The directory that `model` is, or the model on the Hub that it names; asks nobody.

    Args and errors are those of `resolve_model`.
    """
    if os.path.lexists(model):
        if revision is not None:
            raise HubError(f"{model} is a local path, which has no revision {revision!r}")
        return Path(model)
    match = _NAME.fullmatch(str(model))
    if match is None:
        raise CheckpointError(
            "no such checkpoint",
            file=model,
            expected="a directory, or org/name on the Hugging Face Hub",
            found="nothing",
        )
    if revision is not None and match["revision"] not in (None, revision):
        raise HubError(f"{model}: two revisions are given, the other is {revision!r}")
    return HubSnapshot(match["repo"], match["revision"] or revision, progress)


def list_weights(directory: Path) -> list[str]:
    """Names of the weight files of a model in Hugging Face's form, whose small files are here."""
    index = directory / INDEX_FILE
    return sorted(set(read_index(index).values())) if lies_there(index) else [SINGLE_FILE]


class HubSnapshot:
    """One revision of a model on the Hub; the first `fetch` pins it to a commit."""

    def __init__(self, repo: str, revision: str | None, progress: bool) -> None:
        self.repo = repo
        self._revision = revision
        self._commit: str | None = None
        self._progress = progress and sys.stderr.isatty()

    def fetch(self, patterns: tuple[str, ...]) -> Path:
        """Has the files that match, as far as the Hub has them; returns the snapshot."""
        import huggingface_hub
        from tqdm.auto import tqdm

        class Silent(tqdm):  # type: ignore[type-arg]
            def __init__(self, *args: Any, **kwargs: Any) -> None:
                super().__init__(*args, **(kwargs | {"disable": True}))

        with self.errors_explained():
            directory = huggingface_hub.snapshot_download(
                self.repo,
                revision=self._commit or self._revision,
                allow_patterns=list(patterns),
                tqdm_class=None if self._progress else Silent,
            )
        # Snapshots are directories named by their commit.
        self._commit = Path(directory).name
        return Path(directory)

    @property
    def commit(self) -> str:
        """The commit that the first `fetch` has found."""
        assert self._commit is not None
        return self._commit

    def lacks(self, name: str) -> HubError:
        """The error that a shard is not there."""
        return HubError(f"{self.repo} lacks {name}, which {INDEX_FILE} names")

    def is_no_checkpoint(self) -> HubError:
        """The error that no configuration is there."""
        return HubError(
            f"{self.repo} is no checkpoint: it has neither {CONFIG_FILE} nor {MISTRAL_FILE}"
        )

    @contextmanager
    def errors_explained(self) -> Iterator[None]:
        """Turns what goes wrong between here and the Hub into HubError, in one line."""
        from huggingface_hub.errors import HfHubHTTPError, HFValidationError

        # The base of every error of the HTTP client, which is httpx or httpx2 by the version.
        http_error: type[Exception] = HfHubHTTPError.__bases__[0]
        try:
            yield
        except (OSError, HFValidationError, http_error) as error:
            raise self._explain(error) from error

    def _explain(self, error: Exception) -> HubError:
        from huggingface_hub import constants, errors

        repo, endpoint = self.repo, constants.ENDPOINT
        token = "`hf auth login` or HF_TOKEN"
        if isinstance(error, errors.GatedRepoError):
            return HubError(
                f"access to {repo} is restricted; accept its conditions at {endpoint}/{repo} and "
                f"log in ({token})"
            )
        if isinstance(error, errors.RepositoryNotFoundError):
            return HubError(
                f"{repo} is neither a local directory nor a model at {endpoint}; a private model "
                f"needs a token ({token})"
            )
        if isinstance(error, errors.RevisionNotFoundError):
            return HubError(f"{repo} has no revision {self._revision!r} at {endpoint}")
        if isinstance(error, errors.HFValidationError):
            return HubError(f"{repo} is neither a local directory nor a name on the Hub")
        name = repo if self._revision is None else f"{repo}@{self._revision}"
        if isinstance(error, (errors.LocalEntryNotFoundError, errors.OfflineModeIsEnabled)):
            cause = (
                "HF_HUB_OFFLINE keeps the Hub from being asked"
                if constants.HF_HUB_OFFLINE
                else f"{endpoint} cannot be reached ({_one_line(error.__cause__ or error)})"
            )
            return HubError(
                f"{name} is no local directory and not, or not completely, in the cache "
                f"{constants.HF_HUB_CACHE}, and {cause}"
            )
        return HubError(f"cannot download {name} from {endpoint}: {_one_line(error)}")


def _one_line(error: BaseException) -> str:
    return " ".join(str(error).split()) or type(error).__name__
