"""Nothing that comes with a checkpoint is executed, and nobody is asked whether it may be."""

import ast
import contextlib
import json
import logging
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from srt.cli.main import main
from srt.configs.hf_transformers import load_hf_config, load_hf_model
from srt.errors import CheckpointError, RequestError
from srt.managers.tokenizer import encode, encode_chat, load_tokenizer
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, write_checkpoint
from srt.test.tiny_tokenizer import make_tokenizer, write_tokenizer

register_cpu_ci(est_time=20, suite="per-commit")

CLI = "srt generate --prompt a --model"
ROOT = Path(__file__).parents[3]
CODE = """
from pathlib import Path
Path({canary!r}).write_text("it ran")
from transformers import LlamaConfig, LlamaForCausalLM, PreTrainedTokenizerFast
class Config(LlamaConfig): pass
class Model(LlamaForCausalLM): pass
class Tokenizer(PreTrainedTokenizerFast): pass
class Processor: pass
def generate(*args, **kwargs): raise AssertionError
"""


@pytest.fixture
def canary(tmp_path: Path) -> Path:
    """A file that appears if the code of the checkpoint runs."""
    return tmp_path / "canary"


def write(directory: Path, canary: Path, **config: Any) -> Path:
    """A checkpoint that runs, with a module of code wherever transformers looks for one."""
    write_checkpoint(directory, {**TINY_CONFIG, **config}, make_tensors(TINY_CONFIG))
    write_tokenizer(directory)
    (directory / "custom_generate").mkdir()
    for name in ("hostile.py", "custom_generate/generate.py", "requirements.py"):
        (directory / name).write_text(CODE.format(canary=str(canary)))
    return directory


def change(file: Path, **changes: Any) -> int:
    content = json.loads(file.read_text()) if file.exists() else {}
    return file.write_text(json.dumps({**content, **changes}))


TOKENIZER_MAP = {"AutoTokenizer": [None, "hostile.Tokenizer"]}
MODEL_MAP = {"AutoConfig": "hostile.Config", "AutoModelForCausalLM": "hostile.Model"}

# Where a checkpoint may ask for code -> what it changes.
PLACES: dict[str, Callable[[Path], int]] = {
    "tokenizer": lambda d: change(d / "tokenizer_config.json", auto_map=TOKENIZER_MAP),
    "tokenizer-list": lambda d: change(
        d / "tokenizer_config.json", auto_map=["hostile.Tokenizer", "hostile.Tokenizer"]
    ),
    "tokenizer-of-another-repository": lambda d: change(
        d / "tokenizer_config.json", auto_map={"AutoTokenizer": ["a/b--hostile.Tokenizer", None]}
    ),
    "tokenizer-of-its-own-class": lambda d: change(
        d / "tokenizer_config.json", auto_map=TOKENIZER_MAP, tokenizer_class="Tokenizer"
    ),
    # transformers looks a tokenizer's class up among all of its names. This one loads a model.
    "tokenizer-that-is-a-model": lambda d: (
        change(d / "tokenizer_config.json", tokenizer_class="AutoModelForCausalLM")
        and change(d / "config.json", auto_map=MODEL_MAP)
    ),
    "trust-by-itself": lambda d: change(
        d / "tokenizer_config.json", auto_map=TOKENIZER_MAP, trust_remote_code=True
    ),
    "config": lambda d: change(d / "config.json", auto_map=MODEL_MAP),
    "processor": lambda d: change(
        d / "processor_config.json", auto_map={"AutoProcessor": "hostile.Processor"}
    ),
    "generation": lambda d: change(
        d / "generation_config.json", custom_generate=".", trust_remote_code=True, eos_token_id=2
    ),
}


@pytest.mark.parametrize("place", PLACES)
def test_a_checkpoint_that_asks_for_code_runs_without(
    place: str,
    tmp_path: Path,
    canary: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    directory = write(tmp_path / "model", canary)
    PLACES[place](directory)

    def ask(*_: object) -> str:
        raise AssertionError("a question on the terminal")

    monkeypatch.setattr("builtins.input", ask)
    before = set(sys.modules)
    with caplog.at_level(logging.WARNING):
        assert main(["generate", "--model", str(directory), "--prompt", "a"]) == 0
    assert not canary.exists()
    assert not [name for name in set(sys.modules) - before if "hostile" in name]
    asking = json.loads((directory / "tokenizer_config.json").read_text()).get("auto_map")
    if asking:
        assert "tokenizer_config.json: auto_map asks to run code of the checkpoint" in caplog.text
    assert (
        "config.json: auto_map asks to run code of the checkpoint (hostile.Config" in caplog.text
    ) == ("auto_map" in json.loads((directory / "config.json").read_text()))


@pytest.mark.parametrize(
    "place",
    ["tokenizer-of-its-own-class", pytest.param("config", marks=pytest.mark.slow)],
)
def test_yes_on_stdin_is_not_an_answer(place: str, tmp_path: Path, canary: Path) -> None:
    directory = write(tmp_path / "model", canary)
    PLACES[place](directory)
    done = subprocess.run(
        [
            sys.executable,
            *f"-m srt generate --prompt a --model {directory}".split(),
        ],
        input="y\n" * 20,
        capture_output=True,
        text=True,
        timeout=120,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr
    assert not canary.exists()
    assert "[y/N]" not in done.stdout + done.stderr
    assert done.stderr.count("auto_map asks to run code of the checkpoint") == 1, done.stderr


def test_only_the_checkpoints_code_could_read_the_tokenizer(tmp_path: Path, canary: Path) -> None:
    directory = write(tmp_path / "model", canary)
    PLACES["tokenizer-of-its-own-class"](directory)
    (directory / "tokenizer.json").unlink()
    (directory / "vocab.json").write_text("{}")
    with pytest.raises(CheckpointError, match=r"hostile\.Tokenizer.*never done") as caught:
        load_tokenizer(directory)
    assert caught.value.file == directory / "tokenizer_config.json"
    assert not canary.exists()


def test_only_the_checkpoints_code_knows_the_model_type(tmp_path: Path, canary: Path) -> None:
    directory = write(tmp_path / "model", canary)
    config = {**TINY_CONFIG, "model_type": "hostile", "auto_map": MODEL_MAP}
    with pytest.raises(CheckpointError, match=r"no model_type 'hostile'.*hostile\.Config.*never"):
        load_hf_config(config, directory / "config.json")
    assert not canary.exists()


def test_comparisons_with_transformers_run_none_either(tmp_path: Path, canary: Path) -> None:
    directory = write(tmp_path / "model", canary, auto_map=MODEL_MAP)
    import torch

    model = load_hf_model(directory, torch.float32)
    assert type(model).__module__.startswith("transformers.models.llama")
    model.generate(torch.tensor([[1, 5]]), max_new_tokens=1)
    assert not canary.exists()
    for file in directory.glob("*.safetensors"):
        file.rename(directory / "pytorch_model.bin")
    with pytest.raises(CheckpointError, match="transformers cannot load the model"):
        load_hf_model(directory, torch.float32)


@pytest.mark.parametrize(
    "changes",
    [
        {"vocab_file": "/etc/passwd", "merges_file": "/etc/passwd"},
        {"tokenizer_file": "/etc/passwd"},
        {"fast_tokenizer_files": ["tokenizer./../../outside/tokenizer.1.0.json"]},
        {"name_or_path": "../../outside", "init_inputs": ["/etc/passwd"]},
        {"vocab": "/etc/passwd", "merges": "/etc/passwd"},
    ],
)
def test_values_that_name_files_are_not_followed(tmp_path: Path, changes: dict[str, Any]) -> None:
    write_tokenizer(tmp_path)
    change(tmp_path / "tokenizer_config.json", **changes)
    tokenizer: Any = load_tokenizer(tmp_path)
    assert encode(tokenizer, "hé") == make_tokenizer().encode("hé")
    assert tokenizer.name_or_path == str(tmp_path)


@pytest.mark.parametrize(
    "template",
    [
        "{{ ''.__class__.__mro__[1].__subclasses__() }}",
        "{{ cycler.__init__.__globals__.os.system('touch CANARY') }}",
        "{{ messages.append(1) }}",
        "{{ namespace(__class__=1) }}",
        "{{ '{0.__class__}'.format(messages) }}",
        "{% include '/etc/passwd' %}",
        "{% import '/etc/passwd' as x %}",
        "{{ raise_exception.__globals__ }}",
        "{{ (messages|map(attribute='__class__')|list)[0].__mro__ }}",
    ],
)
def test_templates_do_not_reach_python(template: str, canary: Path) -> None:
    """They are refused, or what they ask for is nothing."""
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template.replace("CANARY", str(canary))
    with contextlib.suppress(RequestError):
        assert encode_chat(tokenizer, [{"role": "user", "content": "a"}]) == []
    assert not canary.exists()


# ---- one door ----

# Loads what it made itself, in environments without srt.
FIXTURES = ROOT / "scripts" / "make_format_fixtures.py"
DOOR = ROOT / "srt" / "configs" / "hf_transformers.py"
# What makes objects of a directory's content: of transformers, of pickles, of Python files.
IMPORTERS = ("exec_module", "spec_from_file_location", "run_path", "run_module")
MAKERS = {
    *IMPORTERS,
    "from_pretrained",
    "get_class_from_dynamic_module",
    "load_custom_generate",
    "exec",
    "eval",
    "Unpickler",
    "pipeline",
}
MAKER_MODULES = {
    "pickle": {"load", "loads"},
    "torch": {"load"},
    "joblib": {"load"},
    "marshal": {"load", "loads"},
    "dill": {"load", "loads"},
}
FOLDERS = ("srt", "scripts", "test", "sgl-kernel-cpu/sgl_kernel", "sgl-kernel-cpu/benchmark")
SOURCES = sorted(file for folder in FOLDERS for file in (ROOT / folder).rglob("*.py"))


def makers_in(tree: ast.AST) -> list[tuple[int, str]]:
    """(line, name) of the calls that could execute what a file holds."""
    found = []
    for node in ast.walk(tree):
        if not isinstance(node, ast.Call):
            continue
        target = node.func
        owner = target.value if isinstance(target, ast.Attribute) else None
        name = getattr(target, "attr", getattr(target, "id", ""))
        owner_name = getattr(owner, "id", "")
        if name == "from_pretrained" and owner_name in ("ModelConfig", "cls"):
            continue  # srt's own, which reads JSON
        if name == "eval" and not node.args:
            continue  # nn.Module.eval
        if name in MAKERS or name in MAKER_MODULES.get(owner_name, ()):
            found.append((node.lineno, f"{owner_name}.{name}"))
    return found


def test_one_module_loads_what_checkpoints_bring() -> None:
    assert DOOR in SOURCES
    found = {
        f"{file.relative_to(ROOT)}:{line}": name
        for file in SOURCES
        if file not in (DOOR, FIXTURES)
        for line, name in makers_in(ast.parse(file.read_text(encoding="utf-8")))
        # Tests import the repository's scripts by path.
        if not ("test" in file.parts and name.endswith(IMPORTERS))
    }
    assert found == {}


@pytest.mark.parametrize(
    ("source", "found"),
    [
        ("AutoTokenizer.from_pretrained(path)", True),
        ("torch.load(path)", True),
        ("pickle.loads(data)", True),
        ("ModelConfig.from_pretrained(path)", False),
        ("model.eval()", False),
        ("json.loads(text)", False),
    ],
)
def test_the_search_finds(source: str, found: bool) -> None:
    assert bool(makers_in(ast.parse(source))) == found


@pytest.mark.parametrize(
    ("file", "count", "wanted"),
    [
        (DOOR, 3, {"trust_remote_code": False, "local_files_only": True}),
        (FIXTURES, 2, {"trust_remote_code": False}),
    ],
)
def test_the_door_never_trusts(file: Path, count: int, wanted: dict[str, bool]) -> None:
    calls = [
        node
        for node in ast.walk(ast.parse(file.read_text()))
        if isinstance(node, ast.Call) and getattr(node.func, "attr", "") == "from_pretrained"
    ]
    assert len(calls) == count
    for call in calls:
        given = {k.arg: k.value for k in call.keywords}
        for key, value in wanted.items():
            node = given[key]
            assert isinstance(node, ast.Constant) and node.value is value
