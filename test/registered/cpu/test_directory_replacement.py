"""Directories that appear when they are complete: killed at every step, refused where something
would be lost, and one line for whatever the operating system says.
"""

from __future__ import annotations

import json
import logging
import os
import resource
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from itertools import count
from pathlib import Path

import pytest

from srt.errors import SrtError
from srt.test.ci_register import register_cpu_ci
from srt.utils import directory_replacement, scratch
from srt.utils.directory_replacement import (
    MANIFEST_FILE,
    check_destination,
    replacing_directory,
)
from srt.utils.files import exchange
from srt.utils.places import contains, is_mount_point
from srt.utils.scratch import open_scratch, recover

register_cpu_ci(est_time=8, suite="per-commit")

OLD = {"config.json": "old", "weights": "old" * 1000, "only-old": ""}
NEW = {"config.json": "new", "weights": "new" * 999, "only-new": "x"}
# What a step on the file system is announced as (https://docs.python.org/3/library/audit_events.html).
STEPS = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "os.chmod", "ctypes.dlsym"}


def write(destination: Path, files: dict[str, str], **options: object) -> None:
    with replacing_directory(destination, **options) as directory:  # type: ignore[arg-type]
        for name, text in files.items():
            (directory / name).write_text(text)


def read(directory: Path) -> dict[str, str]:
    files = {file.name: file.read_text() for file in directory.iterdir()}
    manifest = json.loads(files.pop(MANIFEST_FILE))
    assert manifest["files"].keys() == files.keys()
    return files


def expect_refusal(destination: Path, *parts: str, **options: object) -> None:
    """One line with all `parts`, before anything is written; the parent holds what it held."""
    parent = destination.parent
    before = {path: path.lstat().st_mtime_ns for path in parent.rglob("*")}
    with pytest.raises(SrtError) as caught:
        write(destination, NEW, **options)
    assert "\n" not in str(caught.value)
    for part in parts:
        assert part in str(caught.value)
    assert {path: path.lstat().st_mtime_ns for path in parent.rglob("*")} == before


@contextmanager
def mounted(target: Path, *options: str) -> Iterator[None]:
    """Mounts something; skips the test where that is not allowed."""
    command = ["mount", *options, str(target)]
    if os.geteuid() or subprocess.run(command, capture_output=True).returncode:
        pytest.skip("mounting is not allowed here")
    try:
        yield
    finally:
        subprocess.run(["umount", str(target)], check=True)


# Killed at every step.


def run_killed_at(step: int, destination: Path) -> bool:
    """Replaces `destination` in a child that ends before its `step`-th step; whether it did."""
    pid = os.fork()
    if pid == 0:
        steps = count()

        def kill(event: str, args: tuple[object, ...]) -> None:
            if event in STEPS and next(steps) == step:
                os.kill(os.getpid(), signal.SIGKILL)

        sys.addaudithook(kill)
        write(destination, NEW, overwrite=True)
        os._exit(0)
    status = os.waitpid(pid, 0)[1]
    assert status in (0, signal.SIGKILL), f"step {step}: status {status}"
    return status != 0


def kill_everywhere(root: Path, mode: str) -> None:
    """The checks of `test_a_kill_at_any_step_leaves_the_old_or_the_new`; prints the number of
    steps.
    """
    if mode == "fallback":
        vars(scratch)["exchange"] = lambda first, second: False
    foreign = root / ".srt-mine.tmp"
    foreign.mkdir()
    (foreign / "letter").write_text("dear")
    destination = root / "out"
    was_gone = False
    for step in count():
        shutil.rmtree(destination, ignore_errors=True)
        if mode != "create":
            write(destination, OLD)
        if not run_killed_at(step, destination):
            break
        if mode == "fallback":
            # The only gap: between the two renames. Any run in the parent closes it.
            was_gone = was_gone or not destination.exists()
            recover(root)
        if mode != "create" or destination.exists():
            assert read(destination) in ([NEW] if mode == "create" else [OLD, NEW])
        write(destination, NEW | {"again": ""}, overwrite=True)
        assert read(destination) == NEW | {"again": ""}
        left = {path.name for path in root.iterdir()}
        assert left == {"out", foreign.name}, f"step {step}: {left}"
    assert read(destination) == NEW
    assert was_gone == (mode == "fallback")
    assert (foreign / "letter").read_text() == "dear"
    print(step)


@pytest.mark.parametrize("mode", ["create", "exchange", "fallback"])
def test_a_kill_at_any_step_leaves_the_old_or_the_new(tmp_path: Path, mode: str) -> None:
    """In a process of its own, since it forks."""
    command = [sys.executable, __file__, str(tmp_path), mode]
    result = subprocess.run(command, capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert int(result.stdout) > 20


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, MemoryError, OSError])
@pytest.mark.parametrize("replaces", [False, True])
def test_what_interrupts_leaves_nothing(
    tmp_path: Path, error: type[BaseException], replaces: bool
) -> None:
    destination = tmp_path / "out"
    if replaces:
        write(destination, OLD)

    def interrupted() -> None:
        with replacing_directory(destination, overwrite=True) as directory:
            (directory / "half").write_text("x")
            raise error

    with pytest.raises(SrtError if error is OSError else error):
        interrupted()
    assert [path.name for path in tmp_path.iterdir()] == (["out"] if replaces else [])
    assert not replaces or read(destination) == OLD


def test_a_living_process_keeps_its_scratch(tmp_path: Path) -> None:
    with open_scratch(tmp_path / "out") as mine:
        (mine.new / "half").write_text("x")
        expect_refusal(tmp_path / "out", "another process")
        write(tmp_path / "other", NEW)
        assert (mine.new / "half").exists()
    assert [path.name for path in tmp_path.iterdir()] == ["other"]


def test_recovery_touches_nothing_of_others(tmp_path: Path) -> None:
    """Names like ours: a file, a link to a directory, another user's, one that leads elsewhere."""
    precious = tmp_path / "precious"
    precious.mkdir()
    (precious / "config.json").write_text("mine")
    (tmp_path / ".srt-file.tmp").write_text("")
    (tmp_path / ".srt-link.tmp").symlink_to(precious)
    forged = tmp_path / ".srt-forged.tmp"
    forged.mkdir()
    (forged / "owner.json").write_text(json.dumps({"destination": "../precious"}))
    (forged / "new").symlink_to(precious)
    linked = tmp_path / ".srt-linked.tmp"
    linked.mkdir()
    (linked / "owner.json").write_text(json.dumps({"destination": "out"}))
    (linked / "remove.json").write_text(json.dumps(["config.json", "../precious/config.json"]))
    for name in ("new", "swap", "old"):
        (linked / name).symlink_to(precious)
    recover(tmp_path)
    assert (precious / "config.json").read_text() == "mine"
    assert (tmp_path / ".srt-file.tmp").exists()
    assert (tmp_path / ".srt-link.tmp").is_symlink()
    assert forged.exists()


# What would be lost.


@pytest.mark.parametrize(
    ("change", "named"),
    [
        (lambda d: (d / "letter.txt").write_text("dear"), "letter.txt"),
        (lambda d: (d / "sub").mkdir(), "sub"),
        (lambda d: (d / "weights").write_text("edi" * 1000), "weights"),
        (lambda d: (d / "config.json").write_text("longer"), "config.json"),
        (lambda d: (d / MANIFEST_FILE).unlink(), "config.json"),
        (lambda d: (d / MANIFEST_FILE).write_text("[" * 100_000), "no srt_manifest.json"),
        (lambda d: (d / MANIFEST_FILE).write_text('{"format": 1, "files": {"a": 1}}'), "weights"),
        (lambda d: [(d / "only-old").unlink(), (d / "only-old").symlink_to("weights")], "only-old"),
    ],
)
def test_overwrite_refuses_what_it_did_not_write(
    tmp_path: Path, change: object, named: str
) -> None:
    destination = tmp_path / "out"
    write(destination, OLD)
    change(destination)  # type: ignore[operator]
    expect_refusal(destination, str(destination), named, overwrite=True)


def test_overwrite_refuses_a_directory_of_something_else(tmp_path: Path) -> None:
    home = tmp_path / "home"
    home.mkdir()
    (home / "config.json").write_text("{}")
    expect_refusal(home, "not written by this program", "config.json", overwrite=True)
    expect_refusal(home, "not empty", "--overwrite")


def test_overwrite_does_without_files_that_are_gone(tmp_path: Path) -> None:
    write(tmp_path / "out", OLD)
    (tmp_path / "out" / "weights").unlink()
    write(tmp_path / "out", NEW, overwrite=True)
    assert read(tmp_path / "out") == NEW


@pytest.mark.parametrize("change", ["add", "edit", "remove"])
def test_a_destination_that_changes_meanwhile_stays(tmp_path: Path, change: str) -> None:
    destination = tmp_path / "out"
    write(destination, OLD)
    changes = {
        "add": lambda: (destination / "letter").write_text("dear"),
        "edit": lambda: (destination / "weights").write_text("edi" * 1000),
        "remove": lambda: (destination / "weights").unlink(),
    }
    after = {}

    def replace() -> None:
        with replacing_directory(destination, overwrite=True):
            changes[change]()
            after.update({file.name: file.read_bytes() for file in destination.iterdir()})

    with pytest.raises(SrtError, match="changed meanwhile"):
        replace()
    assert {file.name: file.read_bytes() for file in destination.iterdir()} == after
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


def test_a_file_that_comes_in_the_last_moment_is_kept(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    destination = tmp_path / "out"
    write(destination, OLD)

    def late(first: Path, second: Path) -> bool:
        (destination / "letter").write_text("dear")
        return exchange(first, second)

    monkeypatch.setattr(scratch, "exchange", late)
    with caplog.at_level(logging.WARNING):
        write(destination, NEW, overwrite=True)
    assert read(destination) == NEW
    (kept,) = tmp_path.glob(".srt-*.tmp/swap/*")
    assert kept.read_text() == "dear"
    assert str(kept.parent) in caplog.text
    recover(tmp_path)
    assert kept.read_text() == "dear"


@pytest.mark.parametrize("exchanges", [True, False])
def test_a_lost_race_at_the_rename_loses_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, exchanges: bool
) -> None:
    destination = tmp_path / "out"

    def create_late() -> None:
        with replacing_directory(destination) as directory:
            (directory / "a").write_text("")
            destination.mkdir()
            (destination / "letter").write_text("dear")

    with pytest.raises(SrtError, match="out is not written: Directory not empty"):
        create_late()
    assert [path.name for path in destination.iterdir()] == ["letter"]
    shutil.rmtree(destination)
    # Replacing: the old one is moved away under its feet.
    write(destination, OLD)
    if not exchanges:
        monkeypatch.setattr(scratch, "exchange", lambda first, second: False)
    check = directory_replacement._check_unchanged

    def moved_away(place: directory_replacement.Destination) -> None:
        check(place)
        destination.rename(tmp_path / "moved")

    monkeypatch.setattr(directory_replacement, "_check_unchanged", moved_away)
    with pytest.raises(SrtError, match="No such file"):
        write(destination, NEW, overwrite=True)
    assert read(tmp_path / "moved") == OLD
    assert {path.name for path in tmp_path.iterdir()} == {"moved"}


# Places.


@pytest.mark.parametrize(
    ("destination", "found"),
    [
        ("source", "same directory"),
        ("source/.", "same directory"),
        ("source/sub/..", "same directory"),
        ("link", "same directory"),
        ("source/sub", "lies in the source"),
        ("link/new", "lies in the source"),
        ("link/sub/deep", "lies in the source"),
        (".", "holds the source"),
        ("source/..", "holds the source"),
        ("up", "holds the source"),
        ("files", "holds the source"),
    ],
)
def test_source_and_destination_do_not_overlap(
    tmp_path: Path, destination: str, found: str
) -> None:
    root = tmp_path / "root"
    (root / "source" / "sub").mkdir(parents=True)
    (root / "files").mkdir()
    (root / "files" / "weights").write_text("dear")
    (root / "source" / "weights").symlink_to("../files/weights")
    (root / "link").symlink_to("source")
    (root / "up").symlink_to(root)
    sources = [root / "source", root / "source" / "weights"]
    with pytest.raises(SrtError, match=found):
        check_destination(f"{root}/{destination}", overwrite=True, sources=sources)


def test_neighbours_do_not_overlap(tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    for name in ("model-fp8", "mod", "model/../other"):
        check_destination(tmp_path / name, sources=[tmp_path / "model"])


def test_bind_mounts_are_seen_through(tmp_path: Path) -> None:
    source, place = tmp_path / "a" / "source", tmp_path / "mounted here"
    (source / "sub").mkdir(parents=True)
    place.mkdir()
    assert not contains(source, place)
    with mounted(place, "--bind", str(source)):
        assert is_mount_point(place)
        assert contains(source, place / "new")
        assert contains(place, source)
        expect_refusal(place, "same directory", sources=[source])
        expect_refusal(place / "new", "lies in the source", sources=[source])
    with mounted(place, "--bind", str(source / "sub")):
        assert contains(source, place / "new")
        assert not contains(place, source)
        expect_refusal(place / "new", "lies in the source", sources=[source])
    with mounted(place, "--bind", str(tmp_path / "a")):
        assert contains(tmp_path / "a", place / "source")
        expect_refusal(place, "holds the source", sources=[source])
    assert not is_mount_point(place)


@pytest.mark.parametrize("options", [("-t", "tmpfs", "none"), ("--bind", ".")])
def test_a_mount_point_is_refused_and_a_directory_in_it_is_not(
    tmp_path: Path, options: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "elsewhere").mkdir()
    (tmp_path / "mount").mkdir()
    monkeypatch.chdir(tmp_path / "elsewhere")
    with mounted(tmp_path / "mount", *options):
        monkeypatch.chdir(tmp_path)
        expect_refusal(tmp_path / "mount", "is a mount point", "name a directory in it")
        monkeypatch.setattr(directory_replacement, "_DISK_RESERVE", 0)
        write(tmp_path / "mount" / "in", NEW)
        assert read(tmp_path / "mount" / "in") == NEW


def test_a_read_only_file_system_is_refused(tmp_path: Path) -> None:
    (tmp_path / "mount").mkdir()
    with mounted(tmp_path / "mount", "-t", "tmpfs", "-o", "ro", "none"):
        expect_refusal(tmp_path / "mount" / "in", "no permission to write")


@pytest.mark.parametrize("sticky", [False, True])
def test_missing_permission_is_found_first(sticky: bool) -> None:
    if os.geteuid():
        pytest.skip("needs root, to become another user")
    parent = Path(tempfile.mkdtemp())
    try:
        parent.chmod(0o1777 if sticky else 0o755)
        (parent / "out").mkdir()
        pid = os.fork()
        if pid == 0:
            os.setuid(65534)
            try:
                check_destination(parent / "out")
                os._exit(1)
            except SrtError as error:
                os._exit(0 if "permission" in str(error) else 2)
        assert os.waitpid(pid, 0)[1] == 0
    finally:
        shutil.rmtree(parent)


@pytest.mark.parametrize("spelling", [".", "", "..", "sub/.."])
def test_the_current_directory_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, spelling: str
) -> None:
    (tmp_path / "here" / "sub").mkdir(parents=True)
    monkeypatch.chdir(tmp_path / "here")
    with pytest.raises(SrtError, match="is or holds the current directory"):
        check_destination(spelling, overwrite=True)


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "disk").mkdir()
    (tmp_path / "out").symlink_to("disk/model")
    for files in (OLD, NEW):  # dangling first, then to what it has become
        write(tmp_path / "out", files, overwrite=True)
        assert (tmp_path / "out").is_symlink()
        assert read(tmp_path / "disk" / "model") == files
    assert {path.name for path in tmp_path.rglob("*") if path.is_dir()} == {"disk", "model", "out"}


@pytest.mark.parametrize(
    ("target", "found"), [("nowhere/model", "parent directory"), ("out", "is not a directory")]
)
def test_links_that_lead_nowhere(tmp_path: Path, target: str, found: str) -> None:
    (tmp_path / "out").symlink_to(target)
    expect_refusal(tmp_path / "out", found)


@pytest.mark.parametrize("length", [200, 250, 255])
def test_long_names(tmp_path: Path, length: int) -> None:
    for files in (OLD, NEW):
        write(tmp_path / ("n" * length), files, overwrite=True)
    assert read(tmp_path / ("n" * length)) == NEW
    expect_refusal(tmp_path / ("n" * 256), "File name too long")
    expect_refusal(tmp_path / ("n" * 5000), "File name too long")


def test_other_bad_places(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    expect_refusal(tmp_path / "file", "exists and is not a directory", overwrite=True)
    expect_refusal(tmp_path / "file" / "out", "parent directory does not exist")
    expect_refusal(tmp_path / "no" / "out", "parent directory does not exist")


def test_an_empty_destination_keeps_its_mode(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out").chmod(0o750)
    for files in (OLD, NEW):
        write(tmp_path / "out", files, overwrite=True)
        assert (tmp_path / "out").stat().st_mode & 0o7777 == 0o750


# Too little room.


def test_a_full_disk_is_found_before_and_while_writing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    place = tmp_path / "mount"
    place.mkdir()
    with mounted(place, "-t", "tmpfs", "-o", "size=1m", "none"):
        expect_refusal(place / "out", "not enough disk space")
        monkeypatch.setattr(directory_replacement, "_DISK_RESERVE", 0)
        expect_refusal(place / "out", "not enough disk space", nbytes=2_000_000)
        write(place / "out", OLD)
        with pytest.raises(SrtError, match="out is not written: No space left on device"):
            write(place / "out", {"big": "x" * 2_000_000}, overwrite=True)
        assert read(place / "out") == OLD
        assert [path.name for path in place.iterdir()] == ["out"]


def test_a_limit_on_the_size_of_files(tmp_path: Path) -> None:
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    write(tmp_path / "out", OLD)
    resource.setrlimit(resource.RLIMIT_FSIZE, (100_000, limits[1]))
    try:
        with pytest.raises(SrtError, match="out is not written: File too large"):
            write(tmp_path / "out", {"big": "x" * 200_000}, overwrite=True)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert read(tmp_path / "out") == OLD
    assert [path.name for path in tmp_path.iterdir()] == ["out"]


if __name__ == "__main__":
    kill_everywhere(Path(sys.argv[1]), sys.argv[2])
