"""A model's weights on disk as the kernels read them: `--packed-cache DIR`.

The first start writes an entry of `DIR`: the packed parameters as safetensors files and a manifest.
Later starts map these files and neither copy nor pack; processes that run the same model share the
pages. An entry is used only if

- everything that decides what packed parameters look like is the same (`packed_layout.py`);
- the checkpoint's tensors are the same: by the identity of its files, or else by their hashes;
- the parameters have the hashes that the manifest holds, which each start computes.

Otherwise it is rebuilt, with a line in the log. Entries are written beside their place and renamed;
of starts at the same time one writes. What fails here costs the cache and never the start: whatever
lies where an entry or its manifest should be is replaced, and no link is followed to what it points
at.
"""

from __future__ import annotations

import json
import logging
import os
import shutil
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any

from torch import Tensor, nn

from srt.checkpoint.files import MAX_INDEX_BYTES, blaming, read_json
from srt.checkpoint.fingerprint import are_settled, digest_bytes, identify_files
from srt.checkpoint.writer import CheckpointWriter
from srt.errors import CheckpointError, SrtError
from srt.model_loader.mapped_checkpoint import MappedCheckpoint, digest_tensors
from srt.model_loader.tensors import digest_tensor, tensor_spec, write_tensor
from srt.utils.files import os_errors_explained
from srt.utils.progress import byte_bar
from srt.utils.scratch import open_scratch, recover

if TYPE_CHECKING:
    from tqdm import tqdm

logger = logging.getLogger(__name__)

_MANIFEST = "manifest.json"
# Of the checkpoint's name in that of an entry; the hash behind it tells entries apart.
_NAME_BYTES = 80
# Room for headers and manifest when the free disk space is checked.
_DISK_RESERVE = 16 << 20


class PackedCache:
    """The entry of one model in a cache directory.

    Args:
        directory: The cache directory; created when there is something to write.
        checkpoint: The source.
        key: Of `packed_layout_key`.
        tensors: Names of the source tensors that the model takes.
        progress: Show progress bars on stderr if that is a terminal.

    Raises:
        SrtError: `directory` is something else than a directory, or no path that can be one.
    """

    def __init__(
        self,
        directory: Path,
        checkpoint: MappedCheckpoint,
        key: Mapping[str, Any],
        tensors: list[str],
        *,
        progress: bool = False,
    ) -> None:
        with os_errors_explained(f"packed cache {directory} cannot be used"):
            if directory.exists() and not directory.is_dir():
                raise SrtError(f"packed cache {directory} is not a directory")
        source = checkpoint.path.resolve()
        # One entry for each place and its options: an entry that is out of date is replaced.
        place = digest_bytes(json.dumps([str(source), key["options"]]).encode())[:12]
        name = os.fsencode(source.name)[:_NAME_BYTES].decode(errors="replace")
        self._entry = directory / f"{name}-{place}"
        self._checkpoint = checkpoint
        self._key = dict(key)
        self._tensors = tensors
        self._progress = progress
        self._digests: dict[str, str] = {}
        self._identity: dict[str, list[int | str]] = {}
        self._is_settled = False

    def restore(self, model: nn.Module) -> bool:
        """Gives `model` the cached parameters, mapped; False if there is no entry to trust, and
        the model is as it was.
        """
        if not self._entry.is_dir():
            logger.info("packed cache: %s will be written", self._entry)
            return False
        reason: str | None
        try:
            manifest = read_json(self._entry / _MANIFEST, MAX_INDEX_BYTES)
            with blaming("the manifest is not one", self._entry / _MANIFEST):
                reason = self._find_change(manifest) or self._find_source_change(manifest)
                parameters = {} if reason else self._read_parameters(manifest)
                for name in parameters:
                    model.get_submodule(name.rpartition(".")[0])
        except SrtError as error:
            reason = f"it is damaged: {error}"
        if reason:
            logger.warning("packed cache %s is rebuilt; %s", self._entry, reason)
            return False
        _set_parameters(model, parameters)
        return True

    def _find_change(self, manifest: Mapping[str, Any]) -> str | None:
        held = manifest["key"]
        changed = [name for name in self._key if held.get(name) != self._key[name]]
        return f"it was written with other {', '.join(changed)}" if changed else None

    def _find_source_change(self, manifest: Mapping[str, Any]) -> str | None:
        self.start_recording()
        if self._is_settled and self._identity == manifest["source_files"]:
            return None
        logger.info("packed cache: hashing %s, whose files look new", self._checkpoint.path)
        digests = digest_tensors(self._checkpoint, self._tensors)
        self._checkpoint.release()
        held = manifest["source_tensors"]
        changed = [name for name in self._tensors if digests[name] != held.get(name)]
        if changed:
            more = f" and {len(changed) - 1} more" if changed[1:] else ""
            return f"{self._checkpoint.path} has changed: {changed[0]}{more}"
        if self._is_settled:
            self._update_manifest({**manifest, "source_files": self._identity})
        return None

    def _update_manifest(self, manifest: Mapping[str, Any]) -> None:
        """Spares the next start the hashing; not worth more than a try."""
        scratch = self._entry / f".{_MANIFEST}.{os.getpid()}"
        try:
            scratch.unlink(missing_ok=True)
            with scratch.open("x") as stream:  # not through a link
                stream.write(json.dumps(manifest, indent=1))
            scratch.replace(self._entry / _MANIFEST)
        except OSError as error:
            logger.info("packed cache: the manifest stays as it is: %s", error)

    def _read_parameters(self, manifest: Mapping[str, Any]) -> dict[str, Tensor]:
        """Mapped parameters by name. Raises CheckpointError unless all are as they were written."""
        digests = manifest["parameters"]
        with MappedCheckpoint.open(self._entry) as packed:
            if set(packed.names()) != set(digests):
                raise CheckpointError("the manifest names other parameters", file=self._entry)
            parameters = {name: packed.get(name) for name in digests}
            bar = byte_bar(packed.nbytes, "Checking packed weights", enabled=self._progress)
            for name, tensor in _count(parameters, bar):
                found = _digest_parameter(tensor)
                if found != digests[name]:
                    raise CheckpointError(
                        "a parameter has changed",
                        file=packed.meta(name).file,
                        tensor=name,
                        expected=digests[name],
                        found=found,
                    )
        return parameters

    def start_recording(self) -> None:
        """To be called before the first source tensor is read."""
        self._is_settled = are_settled(self._checkpoint.files)
        self._identity = identify_files(self._checkpoint.files)

    def record(self, name: str, tensor: Tensor) -> None:
        """To be called with each source tensor that is read."""
        self._digests[name] = digest_tensor(tensor)

    def store(self, model: nn.Module) -> None:
        """Writes the entry. What goes wrong is logged."""
        parameters = {name: p.data for name, p in model.named_parameters()}
        nbytes = sum(tensor.nbytes for tensor in parameters.values())
        try:
            self._entry.parent.mkdir(parents=True, exist_ok=True)
            if self._entry.name in recover(self._entry.parent):
                logger.info("packed cache: another process writes %s", self._entry)
                return
            free = shutil.disk_usage(self._entry.parent).free
            if free < nbytes + _DISK_RESERVE:
                logger.warning(
                    "packed cache %s is not written: it needs %s bytes, %s are free",
                    self._entry,
                    f"{nbytes + _DISK_RESERVE:,}",
                    f"{free:,}",
                )
                return
            with open_scratch(self._entry) as scratch:
                self._write(scratch.new, parameters)
                # Without the old entry nothing is lost but time.
                _remove(self._entry)
                scratch.move_to_destination()
            logger.info("packed cache: wrote %s", self._entry)
        except (OSError, SrtError) as error:
            logger.warning("packed cache %s is not written: %s", self._entry, error)

    def _write(self, scratch: Path, parameters: Mapping[str, Tensor]) -> None:
        """Fills the empty directory `scratch`."""
        specs = [tensor_spec(name, tensor) for name, tensor in parameters.items()]
        nbytes = sum(spec.nbytes for spec in specs)
        bar = byte_bar(nbytes, "Writing packed weights", enabled=self._progress)
        digests = {}
        with CheckpointWriter(scratch, specs) as writer:
            for name, tensor in _count(parameters, bar):
                write_tensor(writer, name, tensor)
                digests[name] = _digest_parameter(tensor)
        manifest = {
            "key": self._key,
            "source_files": self._identity if self._is_settled else None,
            "source_tensors": self._digests,
            "parameters": digests,
        }
        (scratch / _MANIFEST).write_text(json.dumps(manifest, indent=1))
        if identify_files(self._checkpoint.files) != self._identity:
            raise OSError(f"{self._checkpoint.path} has changed while it was loaded")


def _digest_parameter(tensor: Tensor) -> str:
    """Dtype, shape and hash: a header may say something else of the same bytes."""
    return f"{tensor.dtype} {list(tensor.shape)} {digest_tensor(tensor)}"


def _remove(path: Path) -> None:
    """Removes what lies at `path`, if anything does and it can be; a link, not its target."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path, ignore_errors=True)
    else:
        with suppress(OSError):
            path.unlink()


def _count(parameters: Mapping[str, Tensor], bar: tqdm[Any]) -> Iterator[tuple[str, Tensor]]:
    """The parameters; `bar` moves on by the bytes of each that has been dealt with."""
    with bar:
        for name, tensor in parameters.items():
            yield name, tensor
            bar.update(tensor.nbytes)


def _set_parameters(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    """Makes `parameters` all the parameters that `model` has."""
    for full_name in [name for name, _ in model.named_parameters()]:
        if full_name not in parameters:
            module_name, _, name = full_name.rpartition(".")
            delattr(model.get_submodule(module_name), name)
    for full_name, tensor in parameters.items():
        module_name, _, name = full_name.rpartition(".")
        parameter = nn.Parameter(tensor, requires_grad=False)
        setattr(model.get_submodule(module_name), name, parameter)
