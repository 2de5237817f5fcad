"""Files that are replaced at once: plots, stamps, and whatever else a command writes."""

from __future__ import annotations

import fcntl
import os
import resource
from pathlib import Path

import pytest

from srt.bench.report import plot
from srt.errors import SrtError
from srt.test.ci_register import register_cpu_ci
from srt.utils.files import os_errors_explained, replacing_file, write_text

register_cpu_ci(est_time=2, suite="per-commit")


@pytest.mark.parametrize("name", ["plot.png", "no suffix", "n" * 251 + ".png", "n" * 255])
def test_replaces_the_content_and_keeps_the_mode(tmp_path: Path, name: str) -> None:
    file = tmp_path / name
    write_text(file, "first")
    file.chmod(0o640)
    with replacing_file(file) as scratch:
        assert scratch.suffix == file.suffix
        scratch.write_text("second")
        assert file.read_text() == "first"
    assert file.read_text() == "second"
    assert file.stat().st_mode & 0o777 == 0o640
    assert list(tmp_path.iterdir()) == [file]


@pytest.mark.parametrize("error", [KeyboardInterrupt, ValueError, OSError])
def test_an_error_leaves_the_old_content(tmp_path: Path, error: type[BaseException]) -> None:
    file = tmp_path / "report.json"
    file.write_text("old")

    def interrupted() -> None:
        with replacing_file(file) as scratch:
            scratch.write_text("ne")
            raise error

    with pytest.raises(SrtError if error is OSError else error):
        interrupted()
    assert file.read_text() == "old"
    assert list(tmp_path.iterdir()) == [file]


def test_links_are_followed(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("real")
    for text in ("created", "replaced"):
        write_text(tmp_path / "link", text)
        assert (tmp_path / "real").read_text() == text
        assert (tmp_path / "link").is_symlink()


def test_pipes_and_devices_are_written_to(tmp_path: Path) -> None:
    write_text("/dev/null", "x")
    assert not os.path.isfile("/dev/null")
    read, written = os.pipe()
    with os.fdopen(read) as reader, os.fdopen(written) as writer:
        write_text(f"/dev/fd/{writer.fileno()}", "x")
        writer.close()
        assert reader.read() == "x"


def test_what_a_killed_run_left_is_removed(tmp_path: Path) -> None:
    """Scratch files of this target whose lock is free, and no others."""
    file = tmp_path / "plot.png"
    with replacing_file(file) as scratch:
        scratch.write_text("x")
        left = scratch.with_name(scratch.name.replace(scratch.stem[-16:], "0" * 16))
    for name in (left.name, ".srt-other-plot.png", "plot.png.tmp"):
        (tmp_path / name).write_text("")
    with left.open() as stream:
        fcntl.flock(stream, fcntl.LOCK_EX)
        write_text(file, "y")
        assert left.exists()
    write_text(file, "z")
    assert {path.name for path in tmp_path.iterdir()} == {
        *("plot.png", ".srt-other-plot.png", "plot.png.tmp")
    }


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("", "is a directory"),
        ("no/plot.png", "No such file or directory"),
        ("n" * 256, "File name too long"),
        ("loop", "Too many levels of symbolic links"),
        ("file/plot.png", "Not a directory"),
    ],
)
def test_one_line_says_why_not(tmp_path: Path, name: str, found: str) -> None:
    (tmp_path / "loop").symlink_to("loop")
    (tmp_path / "file").write_text("")
    with pytest.raises(SrtError, match=rf"cannot write .*{found}") as caught:
        write_text(tmp_path / name, "x")
    assert "\n" not in str(caught.value)


def test_names_the_files_that_an_error_concerns(tmp_path: Path) -> None:
    both = r"^no result: No such file or directory \(.*/a -> .*/b\)$"
    with pytest.raises(SrtError, match=both), os_errors_explained("no result"):
        os.rename(tmp_path / "a", tmp_path / "b")
    with pytest.raises(SrtError, match=r"^no result: odd$"), os_errors_explained("no result"):
        raise OSError("odd")


@pytest.mark.parametrize("name", ["plot.png", "plot", "plot.svg"])
def test_a_plot_that_does_not_fit_leaves_the_old_one(tmp_path: Path, name: str) -> None:
    pytest.importorskip("matplotlib")
    row = {"contender": "srt", "batch": 1, "input_len": 2, "output_len": 3}
    for kind in ("prefill", "decode"):
        row |= {f"{kind}_tokens_per_second": 2.0, f"{kind}_range": (1.0, 3.0)}
    facts = {"model": "m", "cpu_model": "c", "isa_tier": "t", "threads": 1}
    plot(facts, [row], tmp_path / name)
    before = (tmp_path / name).read_bytes()
    assert before.startswith(b"<?xml" if name.endswith("svg") else b"\x89PNG")
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (1000, limits[1]))
    try:
        with pytest.raises(SrtError, match="File too large"):
            plot(facts, [row], tmp_path / name)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
    assert (tmp_path / name).read_bytes() == before
    assert [path.name for path in tmp_path.iterdir()] == [name]
