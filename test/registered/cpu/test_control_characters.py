"""Control characters of a model or of a checkpoint's files do not reach a terminal."""

import io
import json
import logging
import sys
from pathlib import Path

import pytest

from srt.cli.main import _LogFormatter, main
from srt.control_characters import escape_controls
from srt.errors import CheckpointError, RequestError, SrtError
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import write_text_model
from srt.test.tiny_tokenizer import make_tokenizer
from srt.utils.console import make_console

register_cpu_ci(est_time=4, suite="per-commit")

TITLE = "\x1b]0;mine\x07"
SHOWN = "\\x1b]0;mine\\x07"


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("controls")
    return str(write_text_model(directory))


@pytest.mark.parametrize(
    ("text", "keep", "shown"),
    [
        ("plain, \u65e5\u00e9\U0001f600", "", "plain, \u65e5\u00e9\U0001f600"),
        (TITLE, "", SHOWN),
        ("a\nb\tc\r", "\n\t", "a\nb\tc\\x0d"),
        ("\x00\x7f\x80\x9b2J\x9f\xa0", "", "\\x00\\x7f\\x80\\x9b2J\\x9f\xa0"),
    ],
)
def test_escapes(text: str, keep: str, shown: str) -> None:
    assert escape_controls(text, keep) == shown


@pytest.mark.parametrize("is_terminal", [True, False])
@pytest.mark.parametrize("options", [[], ["--no-stream"], ["--prompt", "y"], ["chat"]])
def test_what_a_model_says(
    model: str,
    options: list[str],
    is_terminal: bool,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """The model says nothing but ESC."""
    escape = make_tokenizer().encode("\x1b")[0]
    monkeypatch.setattr(sys.stdout, "isatty", lambda: is_terminal)
    monkeypatch.setattr("sys.stdin", io.StringIO("hi\n"))
    command = options if options == ["chat"] else ["generate", "--prompt", "x", *options]
    common = ["--model", model, "--quiet", f"--logit-bias={escape}=1000", "--max-new-tokens", "3"]
    assert main([*command, *common]) == 0
    out = capsys.readouterr().out
    said = "\\x1b" if is_terminal else "\x1b"
    assert out.replace(said, "").strip("xy ->\n") == ""
    assert out.count(said) == (6 if "y" in options else 3)


@pytest.mark.parametrize(
    "error",
    [
        SrtError(f"bad {TITLE}"),
        RequestError(f"the template refuses: {TITLE}"),
        CheckpointError("unknown value", file=f"{TITLE}.json", found=TITLE),
    ],
)
def test_errors(error: SrtError) -> None:
    assert SHOWN in str(error)
    assert "\x1b" not in str(error)


def test_tables_and_log(capsys: pytest.CaptureFixture[str]) -> None:
    make_console().print(f"a name {TITLE}")
    assert capsys.readouterr().out == f"a name {SHOWN}\n"
    record = logging.LogRecord("srt", logging.WARNING, "", 0, "file %s", (TITLE,), None)
    assert _LogFormatter("%(name)s: %(message)s").format(record) == f"srt: file {SHOWN}"


def test_names_in_a_checkpoint(
    model: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = json.loads((Path(model) / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps(config | {"architectures": [TITLE]}))
    assert main(["inspect", str(tmp_path)]) != 0
    out, err = capsys.readouterr()
    assert SHOWN in out + err
    assert "\x1b" not in out + err
