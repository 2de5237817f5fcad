"""`srt chat`: what a person types at a terminal, and the commands."""

import io
import json
import os
import re
import stat
import sys
import termios
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pexpect
import pytest

from srt.chat.conversation import parse_command, unescape
from srt.chat.message_reader import LineReader, history_file, open_history
from srt.cli.main import main
from srt.errors import RequestError
from srt.sampling import sampler
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import TEXT_CONFIG, write_text_model

register_cpu_ci(est_time=25, suite="per-commit")

# Says what the reader hands out; takes less than loading a model.
ECHO = """
from srt.chat.message_reader import TerminalReader, history_file
reader = TerminalReader(history_file())
while True:
    try:
        message = reader.read()
    except KeyboardInterrupt:
        print("<interrupted>")
        continue
    print(f"<{len(message)}:{ascii(message)}>" if message is not None else "<end>")
    if message is None:
        break
"""
UP, LEFT, HOME, CTRL_C, CTRL_D, CTRL_R = "\x1b[A", "\x1b[D", "\x1b[H", "\x03", "\x04", "\x12"


# Tokens of a context in which an answer takes seconds, so that it can be interrupted.
LONG_CONTEXT = 8192


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("chat")
    return str(write_text_model(directory, TEXT_CONFIG | {"max_position_embeddings": LONG_CONTEXT}))


def spawn(state: Path, *arguments: str, term: str = "xterm") -> Any:
    environ = os.environ | {
        "XDG_STATE_HOME": str(state),
        "TERM": term,
        "PROMPT_TOOLKIT_NO_CPR": "1",  # pexpect does not answer where the cursor is
        "PYTHONPATH": os.pathsep.join(sys.path),
    }
    child = pexpect.spawn(
        sys.executable, list(arguments), env=environ, encoding="utf-8", timeout=20
    )
    child.delaybeforesend = None
    return child


def expect_prompt(terminal: Any) -> None:
    """Waits until it reads keys: what is sent before is edited by the terminal itself."""
    terminal.expect_exact("\x1b[?2004h")  # marks pastes from here on


@pytest.fixture
def terminal(tmp_path: Path) -> Iterator[Any]:
    child = spawn(tmp_path, "-c", ECHO)
    expect_prompt(child)
    yield child
    child.close(force=True)


def expect_message(terminal: Any, message: str) -> None:
    terminal.expect_exact(f"<{len(message)}:{message!a}>")


def test_a_line(terminal: Any) -> None:
    terminal.send("h\xe9llo \u4f60\r")
    expect_message(terminal, "h\xe9llo \u4f60")


def test_a_pasted_block_is_one_message(terminal: Any) -> None:
    terminal.send("\x1b[200~first\r\nsecond\rthird\n\n\tlast\x1b[201~")
    terminal.send("\r")
    expect_message(terminal, "first\nsecond\nthird\n\n\tlast")


def test_new_lines_are_typed_with_alt(terminal: Any) -> None:
    terminal.send("one\x1b\rtwo\r")
    expect_message(terminal, "one\ntwo")


def test_lines_are_edited(terminal: Any) -> None:
    terminal.send(f"bc{LEFT}{LEFT}a{HOME}x\r")
    expect_message(terminal, "xabc")


def test_earlier_messages_come_back(terminal: Any) -> None:
    for message in ("the first", "another"):
        terminal.send(f"{message}\r")
        expect_message(terminal, message)
        expect_prompt(terminal)
    terminal.send(f"{UP}{UP}!\r")
    expect_message(terminal, "the first!")
    expect_prompt(terminal)
    terminal.send(f"{CTRL_R}anoth")
    terminal.send("\r")  # takes what was found
    terminal.send("\r")
    expect_message(terminal, "another")


@pytest.mark.parametrize("length", [4095, 4096, 20_000])
def test_long_lines_are_whole(terminal: Any, length: int) -> None:
    text = "".join(chr(97 + i % 26) for i in range(length))
    terminal.send(f"\x1b[200~{text}\x1b[201~\r")
    expect_message(terminal, text)


def test_a_long_line_that_is_typed_is_whole(terminal: Any) -> None:
    text = "0123456789" * 450
    terminal.send(text)
    terminal.send("\r")
    expect_message(terminal, text)


def test_ctrl_c_drops_a_line_and_ctrl_d_ends(terminal: Any) -> None:
    terminal.send("dropped")
    terminal.send(CTRL_C)
    terminal.expect("<interrupted>")
    expect_prompt(terminal)
    terminal.send("kept\r")
    expect_message(terminal, "kept")
    expect_prompt(terminal)
    terminal.send(CTRL_D)
    terminal.expect("<end>")
    terminal.expect(pexpect.EOF)
    terminal.close()
    assert terminal.exitstatus == 0


def test_the_terminal_may_change_its_size(terminal: Any) -> None:
    terminal.send("before ")
    for columns in (20, 7, 200):
        terminal.setwinsize(24, columns)
        time.sleep(0.05)
    terminal.send("after\r")
    expect_message(terminal, "before after")


def test_a_dumb_terminal(tmp_path: Path) -> None:
    child = spawn(tmp_path, "-c", ECHO, term="dumb")
    child.expect("> ")
    child.send("plain\r")
    expect_message(child, "plain")
    child.expect("> ")
    time.sleep(0.3)  # until it reads keys
    child.send(CTRL_D)
    child.expect("<end>")
    child.close(force=True)


def test_history_is_private_and_outlives_the_process(tmp_path: Path) -> None:
    for keys, message in (("secret", "secret"), (UP, "secret")):
        child = spawn(tmp_path, "-c", ECHO)
        expect_prompt(child)
        child.send(f"{keys}\r")
        expect_message(child, message)
        child.close(force=True)
    file = tmp_path / "srt" / "chat_history"
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert stat.S_IMODE(file.parent.stat().st_mode) == 0o700


def test_history_is_bounded(tmp_path: Path) -> None:
    file = tmp_path / "srt" / "chat_history"
    history = open_history(file)
    for i in range(1003):
        history.store_string(f"message {i}\nof two lines")
    history.store_string("x" * 20_000)
    history.store_string("\udcff")
    kept = list(open_history(file).load_history_strings())
    assert kept == [f"message {i}\nof two lines" for i in range(1002, 2, -1)]
    assert stat.S_IMODE(file.stat().st_mode) == 0o600
    assert os.listdir(file.parent) == ["chat_history"]


def test_history_that_cannot_be_written(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "target").write_text("another's")
    (tmp_path / "link").symlink_to(tmp_path / "target")
    for file in (tmp_path / "target" / "x", tmp_path / "link"):
        open_history(file).append_string("x")
        assert "messages are not remembered: " in capsys.readouterr().err
    assert (tmp_path / "target").read_text() == "another's"


@pytest.mark.parametrize(
    ("environ", "file"),
    [
        ({"XDG_STATE_HOME": "/s", "HOME": "/h"}, Path("/s/srt/chat_history")),
        ({"XDG_STATE_HOME": "relative", "HOME": "/h"}, Path("/h/.local/state/srt/chat_history")),
        ({"HOME": "/h"}, Path("/h/.local/state/srt/chat_history")),
        ({}, None),
    ],
)
def test_where_history_lies(environ: dict[str, str], file: Path | None) -> None:
    assert history_file(environ) == file


@pytest.mark.parametrize("encoding", ["utf-8", "ascii", "latin-1"])
def test_lines_of_a_pipe_are_utf_8_in_any_locale(
    encoding: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    content = io.BytesIO("\u65e5\n\n é \n".encode() + b"a\xff\nlast")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(content, encoding=encoding))
    reader = LineReader()
    assert [reader.read() for _ in range(3)] == ["\u65e5", "", "é"]
    with pytest.raises(RequestError, match="a line of stdin is not UTF-8: byte 0xff at position 1"):
        reader.read()
    assert [reader.read() for _ in range(2)] == ["last", None]
    monkeypatch.setattr("sys.stdin", None)
    assert reader.read() is None


@pytest.mark.parametrize(
    ("text", "command"),
    [
        ("/help", ("/help", "")),
        ("/save  a file.json ", ("/save", "a file.json")),
        ("/nosuch x", ("/nosuch", "x")),
        ("/usr/bin/env python", None),
        ("/etc\nis a directory", None),
        ("/ 2", None),
        ("/2", None),
        ("//help", None),
        ("a /help", None),
    ],
)
def test_what_is_a_command(text: str, command: tuple[str, str] | None) -> None:
    assert parse_command(text) == command


def test_two_slashes_stand_for_one() -> None:
    assert unescape("//help") == "/help"
    assert unescape("/usr/bin") == "/usr/bin"


def chat(model: str, monkeypatch: pytest.MonkeyPatch, *lines: str) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert main(["chat", "--model", model, "--max-new-tokens", "3", "--system", "kind"]) == 0


def test_commands(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    saved = tmp_path / "a chat.json"
    chat(
        model,
        monkeypatch,
        "/help",
        "/stats",
        "/system",
        "//help",
        "/usr/bin/env is a path",
        "/stats",
        "/system strict",
        f"/save {saved}",
        f"/save {saved}",
        f"/save {tmp_path}/nowhere/file",
        "/save ~nobody of this name/file",
        "/save a\0b",
        "/save",
        "/reset now",
        "/nosuch",
        "/reset",
        f"/save {saved}.2",
    )
    err = capsys.readouterr().err
    for command in ("/help", "/system", "/reset", "/save", "/stats", "/exit"):
        assert re.search(rf"^{command} ", err, re.MULTILINE)
    assert "no answer yet; cache: 0 of " in err
    assert "\nkind\n" in err
    assert re.search(
        r"^prefill [\d.]+ tokens/s, decode [\d.]+ tokens/s; \d+ prompt tokens \([1-9]\d* from the "
        r"cache\), \d new\ncontext: \d+ of 8192 tokens; cache: [1-9]\d* of \d+ tokens$",
        err,
        re.MULTILINE,
    )
    messages = json.loads(saved.read_text())["messages"]
    assert [m["role"] for m in messages] == ["system", "user", "assistant", "user", "assistant"]
    assert [m["content"] for m in messages if m["role"] != "assistant"] == [
        "strict",
        "/help",
        "/usr/bin/env is a path",
    ]
    assert json.loads(Path(f"{saved}.2").read_text()) == {"messages": messages[:1]}
    for message in (
        f"{saved} exists already; nothing was written",
        f"cannot write {tmp_path}/nowhere/file: No such file",
        "cannot write ~nobody of this name/file: Could not determine home directory",
        "cannot write a\\x00b: embedded null byte",
        "/save: expected the name of a file",
        "/reset takes no argument; found 'now'",
        "unknown command /nosuch; /help lists them",
    ):
        assert f"srt: error: {message}" in err


def test_a_person_goes_on_after_an_answer_that_failed(
    model: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    failures = [MemoryError("no room")]

    def sample(*args: Any) -> Any:
        if failures:
            raise failures.pop()
        return sampler.sample(*args)

    monkeypatch.setattr("srt.managers.forward_pass.sample", sample)
    monkeypatch.setattr("srt.cli.chat.is_terminal", lambda: True)
    monkeypatch.setattr("srt.cli.chat.TerminalReader", lambda _: LineReader())
    saved = tmp_path / "chat.json"
    chat(model, monkeypatch, "first", "second", f"/save {saved}")
    assert "srt: error: request 0: MemoryError: no room" in capsys.readouterr().err
    messages = json.loads(saved.read_text())["messages"]
    assert [m["content"] for m in messages if m["role"] == "user"] == ["second"]


def test_a_conversation_at_a_terminal(model: str, tmp_path: Path) -> None:
    """Loading shows, Ctrl-C stops an answer and keeps what came of it, SIGTERM leaves the terminal
    as it was.
    """
    arguments = ["-m", "srt", "chat", "--model", model, "--ignore-eos", "--max-new-tokens", "4000"]
    child = spawn(tmp_path, *arguments)
    before = termios.tcgetattr(child.child_fd)
    child.expect("loading .* \\.\\.\\.")
    child.expect("/help shows commands")
    expect_prompt(child)
    for _ in range(2):  # a later Ctrl-C is not a second one
        child.send("hi\r")
        child.expect_exact("\x1b[?2004l")
        child.expect(r"\w")  # the answer has begun: before, Ctrl-C takes the message back
        child.send(CTRL_C)
        expect_prompt(child)
    file = tmp_path / "chat.json"
    child.send(f"/save {file}\r")
    child.expect("saved 4 messages")
    expect_prompt(child)
    answers = [m["content"] for m in json.loads(file.read_text())["messages"][1::2]]
    assert all(len(answer) < 4000 for answer in answers)
    child.kill(15)
    child.expect(pexpect.EOF)
    assert termios.tcgetattr(child.child_fd) == before
    child.close()
    assert (child.exitstatus, child.signalstatus) == (143, None)
    assert "Traceback" not in child.before
