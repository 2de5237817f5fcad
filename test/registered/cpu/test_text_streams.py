"""Arguments, stdin, stdout and stderr that are closed, or in encodings that know few characters."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from srt.cli.main import main
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import write_text_model
from srt.test.tiny_tokenizer import make_tokenizer
from srt.utils.text_streams import prepare_streams, read_stdin

register_cpu_ci(est_time=12, suite="per-commit")

CHARACTER = "\u65e5"
BYTES = CHARACTER.encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("streams")
    return str(write_text_model(directory))


def srt(
    model: str,
    *arguments: str | bytes,
    redirect: str = "",
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Runs `srt generate`; `redirect` is the shell's."""
    command = [sys.executable, "-m", "srt", "generate", "--model", model, "--quiet"]
    command += ["--raw", "--max-new-tokens", "2", "--ignore-eos"]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", *command, *arguments],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        env=os.environ | (environment or {}),
    )


ASCII = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_an_encoding_that_knows_few_characters(model: str) -> None:
    """Arguments are read as UTF-8; the model answers with the beginning of a character, and the
    prompt is repeated, both as escapes.
    """
    first = make_tokenizer().encode(CHARACTER)[0]
    two: list[str | bytes] = ["--prompt", BYTES, "--prompt", b"x", f"--logit-bias={first}=1000"]
    result = srt(model, *two, environment=ASCII)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.decode("ascii").startswith("\\u65e5\n  -> \\ufffd")


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_stdin_is_utf_8_in_any_locale(encoding: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(BYTES), encoding=encoding))
    assert read_stdin("the prompt") == CHARACTER


def test_streams_of_other_encodings() -> None:
    with pytest.MonkeyPatch.context() as patch:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="strict")
        patch.setattr("sys.stdout", stream)
        prepare_streams()
        print("\u00e9\u65e5\udcff", end="", flush=True)
    assert stream.buffer.getvalue() == b"\xe9\\u65e5\\udcff"


def test_stdin_that_cannot_be_read_is_one_line(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for stream, message in (
        (io.TextIOWrapper(io.BytesIO(b"ab\xff"), encoding="ascii"), "is not UTF-8: byte 0xff at"),
        (None, "cannot be read: stdin is closed"),
    ):
        monkeypatch.setattr("sys.stdin", stream)
        assert main(["generate", "--model", "m", "--prompt-file", "-"]) == 2
        out, err = capsys.readouterr()
        assert out == ""
        assert re.fullmatch(rf"srt: error: the prompt {message}.*\n", err)


def test_a_closed_stderr_changes_nothing(model: str, tmp_path: Path) -> None:
    """Nor does a file of the checkpoint take its place and messages."""
    result = srt(model, "--prompt", "x", "--json", redirect="2>&- <&-")
    assert (result.returncode, len(json.loads(result.stdout)["outputs"])) == (0, 1)
    bad = srt(model, "--prompt", "x", "--temperature", "-1", redirect="2>&-")
    assert (bad.returncode, bad.stdout) == (2, b"")
