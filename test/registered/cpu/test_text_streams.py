"""Arguments, stdin, stdout and stderr that are closed, or in encodings that know few characters."""

import io
import json
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_tokenizer import VOCAB_SIZE, make_tokenizer, write_tokenizer
from srt.utils.text_streams import prepare_streams

register_cpu_ci(est_time=35, suite="per-commit")

CHARACTER = "\u65e5"
BYTES = CHARACTER.encode()


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("streams")
    config = TINY_CONFIG | {"vocab_size": VOCAB_SIZE}
    write_checkpoint(directory, config, quantize(make_tensors(config)), {"quant_method": "fp8"})
    write_tokenizer(directory)
    return str(directory)


def srt(
    model: str,
    *arguments: str | bytes,
    redirect: str = "",
    stdin: bytes = b"",
    environment: dict[str, str] | None = None,
) -> subprocess.CompletedProcess[bytes]:
    """Runs `srt generate`; `redirect` is the shell's."""
    command = [sys.executable, "-m", "srt.entrypoints.cli", "generate", "--model", model, "--quiet"]
    command += ["--raw", "--max-new-tokens", "2", "--ignore-eos"]
    return subprocess.run(
        ["sh", "-c", f'exec "$@" {redirect}', "sh", *command, *arguments],
        input=stdin,
        capture_output=True,
        env=os.environ | (environment or {}),
    )


ASCII = {"LC_ALL": "POSIX", "PYTHONCOERCECLOCALE": "0", "PYTHONUTF8": "0"}


def test_what_the_encoding_lacks_is_escaped(model: str) -> None:
    """The model answers with the beginning of a character, and the prompt is repeated."""
    first = make_tokenizer().encode(CHARACTER)[0]
    two: list[str | bytes] = ["--prompt", BYTES, "--prompt", b"x", f"--logit-bias={first}=1000"]
    result = srt(model, *two, environment=ASCII)
    assert (result.returncode, result.stderr) == (0, b"")
    assert result.stdout.decode("ascii").startswith("\\u65e5\n  -> \\ufffd")


def test_input_is_utf_8_in_any_locale(model: str) -> None:
    argument = srt(model, "--prompt", BYTES, "--json", environment=ASCII).stdout
    stdin = srt(model, "--prompt-file", "-", "--json", stdin=BYTES, environment=ASCII).stdout
    assert b'"prompt_tokens": 3' in argument
    assert argument.split(b"prefill_seconds")[0] == stdin.split(b"prefill_seconds")[0]


def test_streams_of_other_encodings() -> None:
    with pytest.MonkeyPatch.context() as patch:
        stream = io.TextIOWrapper(io.BytesIO(), encoding="latin-1", errors="strict")
        patch.setattr("sys.stdout", stream)
        prepare_streams()
        print("\u00e9\u65e5\udcff", end="", flush=True)
    assert stream.buffer.getvalue() == b"\xe9\\u65e5\\udcff"


@pytest.mark.parametrize(
    ("arguments", "stdin", "message"),
    [
        (["--prompt", b"a\xff"], b"", "--prompt is not UTF-8: byte 0xff at position 1"),
        (["--prompt", "x", "--system", b"\xfe"], b"", "--system is not UTF-8: byte 0xfe at"),
        (["--prompt", "x", "--stop", b"\xe6\x97"], b"", "--stop is not UTF-8: byte 0xe6 at"),
        (["--prompt-file", "-"], b"ab\xff", "the prompt is not UTF-8: byte 0xff at position 2"),
    ],
)
def test_input_that_is_not_utf_8_is_one_line(
    model: str, arguments: list[str | bytes], stdin: bytes, message: str
) -> None:
    result = srt(model, *arguments, stdin=stdin)
    assert (result.returncode, result.stdout) == (2, b"")
    assert re.fullmatch(rf"srt: error: {re.escape(message)}.*\n", result.stderr.decode())


def test_a_closed_stdout_is_one_line(model: str) -> None:
    result = srt(model, "--prompt", "x", redirect=">&-")
    assert result.returncode == 2
    assert re.fullmatch(r"srt: error: stdout is closed.*\n", result.stderr.decode())


def test_a_closed_stdin_is_one_line(model: str) -> None:
    result = srt(model, "--prompt-file", "-", redirect="<&-")
    assert result.returncode == 2
    assert result.stderr == b"srt: error: the prompt cannot be read: stdin is closed\n"


def test_a_closed_stderr_changes_nothing(model: str, tmp_path: Path) -> None:
    """Nor does a file of the checkpoint take its place and messages."""
    result = srt(model, "--prompt", "x", "--json", redirect="2>&- <&-")
    assert (result.returncode, len(json.loads(result.stdout)["outputs"])) == (0, 1)
    bad = srt(model, "--prompt", "x", "--temperature", "-1", redirect="2>&-")
    assert (bad.returncode, bad.stdout) == (2, b"")
