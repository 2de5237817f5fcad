"""The command line: what goes to stdout and stderr, and exit statuses."""

import io
import json
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

import srt
from srt.cli import generate
from srt.cli.main import main
from srt.managers.tokenizer import ChatOptions
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import write_text_model

register_cpu_ci(est_time=30, suite="per-commit")

SRT = [sys.executable, "-m", "srt"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text_model(tmp_path_factory.mktemp("cli")))


@pytest.fixture(scope="module")
def untemplated(tmp_path_factory: pytest.TempPathFactory) -> str:
    return str(write_text_model(tmp_path_factory.mktemp("cli"), chat_template=False))


def run(*arguments: str) -> int:
    return main([*arguments, "--max-new-tokens", "6", "--ignore-eos"])


def test_generate_streams_then_prints_statistics(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert run("generate", "--model", model, "--prompt", "hi") == 0
    out, err = capsys.readouterr()
    assert run("generate", "--model", model, "--prompt", "hi", "--no-stream", "--quiet") == 0
    assert capsys.readouterr() == (out, "")
    rows = dict(re.findall(r"^(\S+(?: \S+)?) {2,}(\S.*?) *$", err, re.MULTILINE))
    assert rows.keys() == {"prefill", "decode", "ISA tier", "threads", "peak memory"}
    assert re.match(r"[\d.]+ tokens/s +20 tokens$", rows["prefill"])
    assert re.match(r"[\d.]+ tokens/s +6 tokens, ended by length$", rows["decode"])
    assert re.match(r"\d+ MB$", rows["peak memory"])


def test_generate_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--model", model, "--prompt", "a", "--prompt", "bcd", "--json") == 0
    result = json.loads(capsys.readouterr().out)
    assert [len(output["token_ids"]) for output in result["outputs"]] == [6, 6]
    assert [output["prompt_tokens"] for output in result["outputs"]] == [19, 21]
    assert {"isa_tier", "threads", "peak_rss_bytes"} < result.keys()


def test_several_prompts(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("generate", "--model", model, "--prompt", "first", "--prompt", "second") == 0
    out = capsys.readouterr().out
    assert out.startswith("first\n  -> ")
    assert "\nsecond\n  -> " in out


def prompt_tokens(capsys: pytest.CaptureFixture[str], *arguments: str) -> int:
    assert run("generate", *arguments, "--json") == 0
    tokens: int = json.loads(capsys.readouterr().out)["outputs"][0]["prompt_tokens"]
    return tokens


def test_prompt_forms(
    model: str,
    untemplated: str,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    chat = len("<>user:hi<><>assistant:") - len("<>") * 3 + 3
    assert prompt_tokens(capsys, "--model", model, "--prompt", "hi") == chat
    assert prompt_tokens(capsys, "--model", model, "--prompt", "hi", "--chat") == chat
    system = len("system:sys") + 2
    assert (
        prompt_tokens(capsys, "--model", model, "--prompt", "hi", "--system", "sys")
        == chat + system
    )
    assert prompt_tokens(capsys, "--model", model, "--prompt", "hi", "--raw") == 2
    assert prompt_tokens(capsys, "--model", untemplated, "--prompt", "hi") == 2
    file = tmp_path / "prompt.txt"
    file.write_text("from file\n")
    assert prompt_tokens(capsys, "--model", model, "--prompt-file", str(file), "--raw") == 9
    monkeypatch.setattr("sys.stdin", io.StringIO("stdin"))
    assert prompt_tokens(capsys, "--model", model, "--prompt-file", "-", "--raw") == 5


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--prompt", "x", "--temperature", "-1"], "sampling parameter temperature: expected"),
        (["--prompt", "x", "--top-p", "0"], "sampling parameter top_p"),
        (["--prompt", "x", "--threads", "0"], "--threads: expected an integer >= 1, found 0"),
        (["--prompt", "x" * 300], "leaves no room"),
        (["--prompt", "x", "--max-total-tokens", "3"], "does not fit into the KV cache"),
        (["--prompt", "x", "--context-length", "999"], "context length 999"),
        (["--prompt-file", "/nonexistent/prompt"], "cannot read the prompt"),
        (["--prompt", "x", "--raw", "--system", "s"], "--system needs a chat template"),
    ],
)
def test_what_a_user_can_put_right_is_one_line(
    model: str, arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", model, *arguments]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"srt: error: .*{re.escape(message)}.*\n", err)


@pytest.mark.parametrize(
    "arguments",
    [
        [],
        ["nosuch"],
        ["generate"],
        ["generate", "--model", "m"],
        ["generate", "--model", "m", "--prompt", "x", "--dtype", "int8"],
        ["generate", "--model", "m", "--prompt", "x", "--chat", "--raw"],
        ["generate", "--model", "m", "--prompt", "x", "--top-k", "many"],
    ],
)
def test_usage_errors(arguments: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as info:
        main(arguments)
    assert info.value.code == 2
    assert "usage: srt" in capsys.readouterr().err


def test_kernels_that_do_not_load(model: str) -> None:
    result = subprocess.run(
        [*SRT, "generate", "--model", model, "--prompt", "x"],
        capture_output=True,
        text=True,
        env=os.environ | {"SGL_KERNEL_ISA": "nosuch"},
    )
    assert result.returncode == 2
    assert re.fullmatch(r"srt: error: the kernels do not load: .*nosuch.*\n", result.stderr)


@pytest.mark.parametrize("before", [True, False])
def test_debug_shows_the_traceback(before: bool) -> None:
    command = ["generate", "--model", "/nonexistent", "--prompt", "x"]
    with pytest.raises(srt.errors.CheckpointError):
        main(["--debug", *command] if before else [*command, "--debug"])


def test_chat_keeps_the_conversation(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conversations: list[list[str]] = []

    def record(_: object, messages: list[dict[str, str]], options: object) -> list[int]:
        assert options == ChatOptions()
        conversations.append([message["role"] for message in messages])
        return [5, 6, 7]

    monkeypatch.setattr("srt.entrypoints.request_builder.encode_chat", record)
    lines = ["hello", "", "again", "/reset", "/nosuch", "new", "/exit", "never"]
    monkeypatch.setattr("sys.stdin", io.StringIO("\n".join(lines)))
    assert run("chat", "--model", model, "--system", "be kind") == 0
    assert conversations == [
        ["system", "user"],
        ["system", "user", "assistant", "user"],
        ["system", "user"],
    ]
    out, err = capsys.readouterr()
    assert out.count("\n") >= 3
    assert "unknown command /nosuch" in err


def test_chat_ends_with_its_input(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO("hello"))
    assert run("chat", "--model", model) == 0


def test_chat_needs_a_template(untemplated: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert run("chat", "--model", untemplated) == 2
    assert "srt chat needs a chat template, which" in capsys.readouterr().err


def test_interrupt(
    model: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def interrupt(_: object) -> Iterator[None]:
        raise KeyboardInterrupt

    monkeypatch.setattr(generate, "_stream", interrupt)
    assert run("generate", "--model", model, "--prompt", "x") == 130
    assert "Traceback" not in capsys.readouterr().err


def test_interrupt_of_the_process(model: str) -> None:
    process = subprocess.Popen(
        [*SRT, "chat", "--model", model, "--quiet"],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
    )
    assert process.stdin is not None
    assert process.stdout is not None
    process.stdin.write("hello\n")
    process.stdin.flush()
    assert process.stdout.readline()  # it has answered and waits
    time.sleep(0.1)
    process.send_signal(signal.SIGINT)
    _, err = process.communicate(timeout=60)
    assert (process.returncode, err.strip()) == (130, "")


def test_error_of_the_process(tmp_path: Path) -> None:
    result = subprocess.run(
        [*SRT, "generate", "--model", str(tmp_path), "--prompt", "x"],
        capture_output=True,
        text=True,
    )
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(r"srt: error: .*config\.json.*\n", result.stderr)


def test_a_reader_that_leaves(model: str) -> None:
    command = " ".join([*SRT, "generate", "--model", model, "--prompt", "x", "--quiet"])
    result = subprocess.run(
        ["bash", "-c", f"{command} | true; exit ${{PIPESTATUS[0]}}"], capture_output=True, text=True
    )
    assert result.returncode in (0, 1)
    assert result.stderr == ""


@pytest.mark.parametrize("arguments", [["--version"], ["generate", "--help"]])
def test_version_and_help_come_without_loading_torch(arguments: list[str]) -> None:
    program = (
        "import sys; from srt.cli.main import main\n"
        f"try: main({arguments!r})\n"
        "except SystemExit as e: assert e.code == 0\n"
        "assert 'torch' not in sys.modules and 'transformers' not in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert ("usage" in result.stdout) or result.stdout == f"srt {srt.__version__}\n"
