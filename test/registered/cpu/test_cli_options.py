"""Options: spellings of others, checks before a model is loaded, and what works without kernels."""

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from srt import Engine
from srt.cli.main import main, make_parser
from srt.configs.dtypes import ACTIVATION_DTYPES
from srt.configs.model_config import _resolve_dtype
from srt.model_executor import model_runner
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import write_text_model
from srt.test.tiny_tokenizer import write_tokenizer
from srt.utils import threads
from srt.utils.threads import ThreadPlan, apply_thread_plan

register_cpu_ci(est_time=20, suite="per-commit")

GENERATE = ["generate", "--model", "m", "--prompt", "x"]
PERPLEXITY = ["perplexity", "--text", "/dev/null"]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("a name of a checkpoint that is longer than most lines are")
    return str(write_text_model(directory))


@pytest.mark.parametrize(
    ("options", "name", "value"),
    [
        (["--model-path", "p"], "model_path", "p"),
        (["--max-model-len", "7"], "context_length", 7),
        (["--mem-fraction-static", "0.25"], "mem_fraction", 0.25),
        (["--disable-cuda-graph"], "disable_graph", True),
        (["--enforce-eager"], "disable_graph", True),
    ],
)
def test_names_that_peers_give_our_options(options: list[str], name: str, value: object) -> None:
    args = make_parser().parse_args([*GENERATE, *options])
    assert getattr(args, name) == value
    assert getattr(make_parser().parse_args(GENERATE), name) != value


@pytest.mark.parametrize(
    ("spelling", "dtype"),
    [
        ("auto", torch.float16),
        ("half", torch.float16),
        ("fp16", torch.float16),
        ("float16", torch.float16),
        ("bf16", torch.bfloat16),
        ("bfloat16", torch.bfloat16),
        ("float", torch.float32),
        ("fp32", torch.float32),
        ("float32", torch.float32),
    ],
)
def test_spellings_of_dtypes(spelling: str, dtype: torch.dtype) -> None:
    args = make_parser().parse_args([*GENERATE, "--dtype", spelling])
    assert _resolve_dtype(args.dtype) == dtype
    assert spelling in ACTIVATION_DTYPES


@pytest.mark.parametrize("spelling", ["fp8", "fp8_e4m3", "fp8_e4m3fn"])
def test_spellings_of_the_dtype_of_the_cache(model: str, spelling: str) -> None:
    args = make_parser().parse_args([*GENERATE, "--kv-cache-dtype", spelling])
    with Engine(
        model, kv_cache_dtype=args.kv_cache_dtype, max_total_tokens=8, progress=False
    ) as engine:
        assert engine.model_runner.kv_pool.bytes_per_token == 2 * 2 * 32  # layers, k and v, head


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "--prompt", "x", "--temperature", "-1"], "sampling parameter temperature"),
        (["generate", "--prompt", "x", "--threads", "0"], "--threads: expected an integer >= 1"),
        (["generate", "--prompt", "x", "--mem-fraction", "0"], "--mem-fraction: expected a"),
        (
            ["generate", "--prompt", "x", "--mem-fraction", "nan"],
            "--mem-fraction: expected a",
        ),
        (["generate", "--prompt", "x", "--max-total-tokens", "0"], "--max-total-tokens: expected"),
        (["generate", "--prompt", "x", "--context-length", "0"], "--context-length: expected"),
        (["generate", "--prompt", "x", "--chunked-prefill-size", "0"], "--chunked-prefill-size"),
        (["generate", "--prompt", "x", "--raw", "--system", "s"], "--system needs a chat template"),
        (
            ["generate", "--prompt", "x", "--raw", "--chat-template-kwargs", "{}"],
            "which --raw goes",
        ),
        (["generate", "--prompt", "x", "--seed", str(2**64)], "sampling parameter seed"),
        (["generate", "--prompt", "x", "--seed", "-1"], "sampling parameter seed"),
        (["generate", "--prompt-file", "/nonexistent/x"], "cannot read the prompt"),
        (["chat", "--top-p", "0"], "sampling parameter top_p"),
        (["bench", "--batch-size", "0"], "batch sizes and repetitions >= 1"),
        (["bench", "--plot", "plot.xyz"], "--plot plot.xyz: expected a name that ends in .png"),
        (["bench", "--plot", "/nonexistent/p.png"], "there is no directory /nonexistent"),
        (["bench", "--plot", "/proc/p.png"], "/proc cannot be written"),
        (["bench", "--gguf", "x.gguf"], "--gguf needs llama-bench on PATH; found none"),
        (["bench", "--transformers", "nowhere"], "transformers cannot load nowhere"),
        ([*PERPLEXITY, "--window", "1"], "--window 1: expected 2 at least"),
        ([*PERPLEXITY, "--stride", "0"], "--stride 0: expected 1 to 1023"),
        ([*PERPLEXITY, "--stride", "1024"], "--stride 1024: expected 1 to 1023"),
        ([*PERPLEXITY, "--tokens", "1"], "--tokens 1: expected 2 at least"),
        (["perplexity", "--text", "/nonexistent/x"], "cannot read the text"),
    ],
)
def test_what_is_wrong_with_options_is_said_before_a_model_is_loaded(
    model: str,
    arguments: list[str],
    message: str,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def load(*_: object, **__: object) -> None:
        pytest.fail("loads the model first")

    monkeypatch.setattr(model_runner, "load_model", load)
    monkeypatch.setenv("PATH", "")
    # The superuser may write anywhere.
    monkeypatch.setattr("os.access", lambda path, _: str(path) != "/proc")
    assert main([*arguments, "--model", model]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert re.fullmatch(rf"srt: error: .*{re.escape(message)}.*\n", err)


@pytest.mark.parametrize(
    "options", [["chat"], ["generate", "--prompt", "x", "--system", "s"]], ids=["chat", "generate"]
)
def test_a_template_that_is_needed_is_looked_for_before_the_weights_are_read(
    model: str,
    tmp_path: Path,
    options: list[str],
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    shutil.copytree(model, tmp_path, dirs_exist_ok=True)
    write_tokenizer(tmp_path, chat_template=False)
    (tmp_path / "chat_template.jinja").unlink(missing_ok=True)
    monkeypatch.setattr(model_runner, "load_model", lambda *_, **__: pytest.fail("loads first"))
    assert main([*options, "--model", str(tmp_path)]) == 2
    assert "needs a chat template, which" in capsys.readouterr().err


@pytest.mark.parametrize("option", ["prompt", "system", "stop"])
@pytest.mark.parametrize("text", [b"\xff", b"a\xc3", b"\xed\xa0\x80"])
def test_arguments_that_are_not_utf8_in_one_line(
    option: str, text: bytes, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main([*GENERATE, f"--{option}", os.fsdecode(text)]) == 2
    assert re.fullmatch(rf"srt: error: --{option} is not UTF-8: byte .*\n", capsys.readouterr().err)


def test_matplotlib_is_looked_for_before_anything_is_measured(
    model: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("srt.bench.plot_file.find_spec", lambda _: None)
    monkeypatch.setattr(model_runner, "load_model", lambda *_, **__: pytest.fail("loads first"))
    assert main(["bench", "--model", model, "--plot", "p.png"]) == 2
    assert capsys.readouterr().err.endswith("--plot needs matplotlib: pip install matplotlib\n")


@pytest.mark.parametrize(("count", "cpus", "warns"), [(99, 2, True), (3, 2, True), (2, 2, False)])
def test_more_threads_than_cpus_warn(
    count: int,
    cpus: int,
    warns: bool,
    caplog: pytest.LogCaptureFixture,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch, "set_num_threads", lambda _: None)
    monkeypatch.setattr(threads, "_affinity", lambda: range(cpus))
    apply_thread_plan(ThreadPlan(count, None, (), "as asked for"))
    messages = [r.getMessage() for r in caplog.records if r.levelname == "WARNING"]
    assert bool(messages) == warns
    assert all(m.startswith(f"{count} threads (as asked for) on 2 CPUs") for m in messages)


@pytest.mark.parametrize("command", ["inspect", "env"])
def test_tables_are_whole_in_pipes(
    model: str, command: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    monkeypatch.setenv("SRT_LONG", "x" * 300)
    assert main([command, model] if command == "inspect" else [command]) == 0
    lines = capsys.readouterr().out.splitlines()
    whole = model if command == "inspect" else "x" * 300
    assert sum(whole in line for line in lines) == 1
    first = {line.split()[0] for line in lines if line.strip()}
    assert first >= ({"architecture", "memory"} if command == "inspect" else {"versions", "cpu"})


# An installation without the kernels.
HIDE = """
import importlib.metadata, sys

class Hide:
    def find_spec(self, name, path=None, target=None):
        if name == "sgl_kernel":
            raise ModuleNotFoundError("No module named 'sgl_kernel'", name=name)

sys.meta_path.insert(0, Hide())
version = importlib.metadata.version

def hidden(name):
    if name == "sgl-kernel-cpu":
        raise importlib.metadata.PackageNotFoundError(name)
    return version(name)

importlib.metadata.version = hidden
"""


def run_without_kernels(tmp_path: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    (tmp_path / "sitecustomize.py").write_text(HIDE)
    return subprocess.run(
        [sys.executable, "-m", "srt", *arguments],
        capture_output=True,
        text=True,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(tmp_path), *sys.path])},
    )


@pytest.mark.parametrize("command", ["--version", "--help", "env", "inspect"])
def test_without_kernels_this_works(model: str, tmp_path: Path, command: str) -> None:
    arguments = {"env": ["env", "--json"], "inspect": ["inspect", model, "--json"]}
    result = run_without_kernels(tmp_path, *arguments.get(command, [command]))
    # To `inspect` they are one more thing that may be missing for a model to run.
    assert (result.returncode, result.stderr) == (int(command == "inspect"), "")
    if command == "env":
        assert "No module named 'sgl_kernel'" in json.loads(result.stdout)["kernels"]["problem"]
    if command == "inspect":
        report = json.loads(result.stdout)
        assert report["architecture"] == "LlamaForCausalLM"
        assert "sgl-kernel-cpu" in report["problems"][0]


@pytest.mark.parametrize("command", ["generate", "chat", "bench", "perplexity"])
def test_without_kernels_the_others_say_so_in_one_line(tmp_path: Path, command: str) -> None:
    options = {"generate": ["--prompt", "x"], "perplexity": ["--text", "/dev/null"]}
    result = run_without_kernels(tmp_path, command, "--model", "m", *options.get(command, []))
    assert (result.returncode, result.stdout) == (2, "")
    assert re.fullmatch(
        r"srt: error: srt .* needs sgl-kernel-cpu .* is not installed\. Run: make .*\n",
        result.stderr,
    )


def test_stdout_that_is_closed_or_full(model: str) -> None:
    srt = f"{sys.executable} -m srt"
    for redirection, message in ((">&-", "stdout is closed"), (">/dev/full", "No space left")):
        result = subprocess.run(
            ["sh", "-c", f"{srt} inspect '{model}' {redirection}"], capture_output=True, text=True
        )
        assert result.returncode == 2
        assert re.fullmatch(rf"srt: error: .*{message}.*\n", result.stderr)
