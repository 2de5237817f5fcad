"""The floors that docs/architecture.md draws hold; what documents name and link to exists."""

import ast
import re
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=3, suite="per-commit")

ROOT = Path(__file__).resolve().parents[3]
ARCHITECTURE = "docs/architecture.md"
DOCUMENTS = [
    file.relative_to(ROOT).as_posix()
    for folder in ("", "docs", "sgl-kernel-cpu", "scripts/emulator")
    for file in sorted((ROOT / folder).glob("*.md"))
]
# Files of checkpoints, of Bochs, and those that a reader makes.
FOREIGN = {
    "additional_chat_templates/",
    "custom_generate/",
    "cpu/decoder/features.h",
    "probe.cpp",
    "opticks.txt",
}
SERVER_PACKAGES = {
    "fastapi",
    "httptools",
    "prometheus_client",
    "pydantic",
    "starlette",
    "uvicorn",
    "uvloop",
}
Graph = dict[str, set[str]]


def module_name(file: Path, base: Path) -> str:
    parts = file.relative_to(base).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


def imported(file: Path) -> Iterator[tuple[str, str]]:
    """What a file imports, wherever in it: the module, and the name taken from it or nothing."""
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0 and node.module, f"{file}: a relative import"
            yield from ((node.module, alias.name) for alias in node.names)


def read_graph(package: Path) -> Graph:
    """Imports of each module of a package: its own modules by their names, others by the name of
    their package.
    """
    files = {module_name(file, package.parent): file for file in package.rglob("*.py")}
    graph: Graph = {}
    for module, file in files.items():
        found = graph[module] = set()
        for source, name in imported(file):
            own = next((n for n in (f"{source}.{name}", source) if n in files), None)
            found.add(own or source.partition(".")[0])
    return graph


def reachable(graph: Graph, start: str) -> set[str]:
    found, new = {start}, [start]
    while new:
        ahead = graph.get(new.pop(), set()) - found
        found |= ahead
        new += ahead
    return found


def read_floors() -> dict[str, int]:
    """The height of each folder and file of srt in the drawing; the lowest line is 0."""
    text = (ROOT / ARCHITECTURE).read_text().partition("\n### The floors\n")[2]
    block = re.search(r"(?:^ {4}.*\n)+", text, re.MULTILINE)
    assert block is not None
    lines = [re.findall(r"[\w/]+(?:/|\.py)", line) for line in block[0].splitlines()]
    names = [name for line in lines for name in line]
    assert len(set(names)) == len(names)
    return {name: height for height, line in enumerate(reversed(lines)) for name in line}


FLOORS = read_floors()


def place(module: str) -> str:
    """The folder or file of the drawing that a module of srt belongs to; its own path if there is
    none.
    """
    path = "/".join(module.split(".")[1:])
    path += "/__init__.py" if path and (ROOT / "srt" / path).is_dir() else ".py"
    path = path if module != "srt" else "__init__.py"
    return max((name for name in FLOORS if path.startswith(name)), key=len, default=path)


SRT = read_graph(ROOT / "srt")
KERNELS = read_graph(ROOT / "sgl-kernel-cpu" / "sgl_kernel")
# What the wheel holds.
PRODUCT = {m: found for m, found in SRT.items() if not f"{m}.".startswith("srt.test.")}


def test_the_drawing_has_every_place_of_srt() -> None:
    assert {place(module) for module in PRODUCT} == FLOORS.keys()


def test_imports_go_down() -> None:
    """From a floor to a lower one, never to another place on the same; also inside functions and
    for types only.
    """
    up = {
        f"{module} -> {target}"
        for module, targets in PRODUCT.items()
        for target in targets & PRODUCT.keys()
        if place(module) != place(target) and FLOORS[place(target)] >= FLOORS[place(module)]
    }
    assert not up


@pytest.mark.parametrize("graph", [SRT, KERNELS], ids=["srt", "sgl_kernel"])
def test_no_circle_of_files(graph: Graph) -> None:
    circles = {
        frozenset(other for other in reachable(graph, module) if module in reachable(graph, other))
        for module in graph
    }
    assert [sorted(circle) for circle in circles if len(circle) > 1] == []


def test_what_a_checkpoint_says_needs_no_torch() -> None:
    for module in PRODUCT:
        if place(module).startswith("checkpoint/"):
            assert not reachable(PRODUCT, module) & {"torch", "sgl_kernel"}, module


def test_packages_know_each_other_in_one_direction() -> None:
    assert not {"srt"} & set().union(*KERNELS.values())
    users = {place(module) for module, found in SRT.items() if "sgl_kernel" in found}
    assert "layers/" in users
    tests = SRT.keys() - PRODUCT.keys()
    assert tests and not [module for module, found in PRODUCT.items() if found & tests]


def test_the_wheel_has_the_product_no_tests_and_what_it_imports(tmp_path: Path) -> None:
    for name in ("pyproject.toml", "README.md", "LICENSE"):
        shutil.copy(ROOT / name, tmp_path)
    shutil.copytree(ROOT / "srt", tmp_path / "srt", ignore=shutil.ignore_patterns("__pycache__"))
    build = "import setuptools.build_meta as b; b.build_wheel('dist')"
    command = [sys.executable, "-c", build]
    subprocess.run(command, cwd=tmp_path, check=True, capture_output=True)
    with zipfile.ZipFile(next((tmp_path / "dist").iterdir())) as wheel:
        names = wheel.namelist()
        metadata = wheel.read(next(n for n in names if n.endswith("/METADATA"))).decode()
    modules = {module_name(Path(n), Path()) for n in names if n.endswith(".py")}
    assert modules == PRODUCT.keys()
    assert "srt/py.typed" in names
    page = {file.relative_to(ROOT).as_posix() for file in (ROOT / "srt/serve/page").iterdir()}
    assert "srt/serve/page/index.html" in page <= {*names}
    lines = re.findall(r"^Requires-Dist: (.*)$", metadata, re.MULTILINE)
    required = {r.name for r in map(Requirement, lines) if r.marker is None}
    others = set[str]().union(*PRODUCT.values()) - PRODUCT.keys() - sys.stdlib_module_names
    # The kernels are built for the machine, markupsafe is Jinja's; plots and the server are extras.
    others_of_extras = {"matplotlib"} | SERVER_PACKAGES
    assert others == required | {"sgl_kernel", "markupsafe"} | others_of_extras


def test_only_the_server_needs_its_packages() -> None:
    # `srt bench serve` reads answers with the parser that the server reads requests with.
    packages = SERVER_PACKAGES - {"httptools"}
    users = {module for module, found in PRODUCT.items() if found & packages}
    assert users and {place(module) for module in users} == {"serve/"}
    # The command line knows the server's options without them.
    program = "import sys, srt.cli.main as m; m.make_parser(); print(*sys.modules)"
    command = [sys.executable, "-c", program]
    loaded = subprocess.run(command, check=True, capture_output=True, text=True).stdout.split()
    assert not SERVER_PACKAGES & {*loaded}


def names_of_files(document: str) -> set[str]:
    """Words of a document's code and drawings that look like files or folders of the tree."""
    text = (ROOT / document).read_text()
    code = re.findall(r"`([^`\n]+)`|^ {4}(.+)$", text, re.MULTILINE)
    words = re.findall(r"[\w.\-/*{},<>]+", " ".join(f"{inline} {block}" for inline, block in code))
    kinds = r"\w(?:/|\.(?:py|md|h|inc|cpp|c|sh|cmake|toml|txt|yml))"
    names = {name for word in words if re.search(rf"{kinds}$", name := word.strip(",."))}
    return {name for name in names if not name.startswith("/")} - FOREIGN


def expand(name: str) -> list[str]:
    """`a{b,c}` as ab and ac; `<tier>` stands for any text."""
    name = re.sub(r"<\w+>", "*", name)
    brace = re.search(r"\{([^{}]*)\}", name)
    if brace is None:
        return [name]
    head, tail = name[: brace.start()], name[brace.end() :]
    return [whole for part in brace[1].split(",") for whole in expand(head + part + tail)]


@pytest.mark.parametrize("document", DOCUMENTS)
def test_files_that_the_documents_name_exist(document: str) -> None:
    """Names are relative to the root, to a package or to the kernels' sources; one without a folder
    may be anywhere in these.
    """
    bases = [ROOT / base for base in ("", "srt", "sgl-kernel-cpu", "sgl-kernel-cpu/csrc/cpu")]
    anywhere = ("srt", "sgl-kernel-cpu", "test", "docs", "scripts")
    missing = [
        name
        for name in names_of_files(document)
        for path in expand(name)
        if not any(next(base.glob(path.rstrip("/")), None) for base in bases)
        and ("/" in path or not any(next((ROOT / a).rglob(path), None) for a in anywhere))
    ]
    assert sorted(missing) == []


def anchors(document: Path) -> set[str]:
    """What a link may name behind `#`: the headings, as GitHub spells them."""
    headings = re.findall(r"^#+ (.+)$", document.read_text(), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in headings}


def test_documents_name_files_and_link() -> None:
    """What the tests of documents look for is found at all."""
    assert {ARCHITECTURE, "README.md", "CONTRIBUTING.md", "sgl-kernel-cpu/README.md"} <= {
        *DOCUMENTS
    }
    assert len(names_of_files(ARCHITECTURE)) > 100
    assert {"adding-an-op", "adding-a-checkpoint-format-or-a-model"} <= anchors(
        ROOT / "CONTRIBUTING.md"
    )


@pytest.mark.parametrize("document", DOCUMENTS)
def test_what_the_documents_link_to_exists(document: str) -> None:
    links = re.findall(r"\]\(([^)#\s]*)(?:#([^)\s]+))?\)", (ROOT / document).read_text())
    broken = []
    for path, anchor in links:
        if ":" in path:  # a page elsewhere
            continue
        target = (ROOT / document).parent / path if path else ROOT / document
        if not target.exists() or (anchor and anchor not in anchors(target)):
            broken.append(f"{path}#{anchor}")
    assert broken == []
