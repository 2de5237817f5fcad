"""CONTRIBUTING.md says which files a new op touches: a toy op is added to a copy of the tree there
and nowhere else, and passes the tests of all ops.
"""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import sgl_kernel
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=25, suite="per-commit")

ROOT = Path(__file__).parents[3]
KERNELS = "sgl-kernel-cpu/csrc/cpu"
OPS = f"{KERNELS}/torch/ops_transformer.cpp"
SCHEMA = "(Tensor input, float factor=2.0) -> Tensor"

# By file: where something is put, and what.
EDITS = {
    OPS: [
        (
            "const RegisteredOp kOps[] = {\n",
            "Tensor toy_scale_cpu(const Tensor& input, double factor) {\n"
            '  const Checker check("toy_scale_cpu");\n'
            '  check_float_dtype(check, input, "input");\n'
            '  check.contiguous(input, "input");\n'
            '  check.number(factor, "factor", NumberRange::any);\n'
            "  return new_output(input, input.sizes(), input.scalar_type());\n"
            "}\n\n"
            "const RegisteredOp kOps[] = {\n"
            f'    SGL_OP(toy_scale_cpu, "{SCHEMA}"),\n',
        )
    ],
    "sgl-kernel-cpu/sgl_kernel/transformer.py": [
        ("__all__ = [\n", '__all__ = [\n    "toy_scale_cpu",\n'),
        (
            "\n\n@op\ndef rmsnorm_cpu(",
            "\n\n@op\n"
            "def toy_scale_cpu(input: Tensor, factor: float = 2.0) -> Tensor:\n"
            '    """``input * factor``."""\n'
            "    return input.new_empty(input.shape)\n"
            "\n\n@op\ndef rmsnorm_cpu(",
        ),
    ],
    "srt/test/kernels/rows.py": [
        (
            "RECORDS: Records = {\n",
            "@dataclass(frozen=True)\n"
            "class ToyCall:\n"
            '    """The toy."""\n'
            "    n: int\n\n"
            "    def check(self, tier: str) -> None:\n"
            "        x = torch.randn(self.n)\n"
            "        check_close(sgl_kernel.toy_scale_cpu(x, 3.0), x.double() * 3, U * x.abs())\n"
            "\n\n"
            "RECORDS: Records = {\n"
            '    "toy_scale_cpu": OpRecord(\n'
            "        samples=lambda: [(torch.randn(3, 4),), (torch.randn(3, 4), 0.5)],\n"
            '        arguments=lambda dtype, _: {"input": ones(M, dtype=dtype), "factor": 2.0},\n'
            '        is_allowed=lambda given: is_dense(given["input"], FLOATS)\n'
            '        and given["input"].is_contiguous()\n'
            '        and is_number(given["factor"]),\n'
            "        calls=st.builds(ToyCall, sizes(1, 100)),\n"
            "    ),\n",
        ),
        ("    is_dense,\n", "    is_dense,\n    is_number,\n"),
    ],
    "sgl-kernel-cpu/README.md": [
        (
            "| `silu_and_mul_cpu(",
            "| `toy_scale_cpu(input, factor=2.0)` | scaled |\n| `silu_and_mul_cpu(",
        )
    ],
    "sgl-kernel-cpu/CHANGELOG.md": [("# Changelog\n", "# Changelog\n\nA toy.\n")],
}

# In place of the library that a contributor would build: the edited schema with a kernel in Python.
BUILT = """
import re, sys
import pytest
import torch

def toy_scale(input, factor=2.0):
    def fail(argument, expected):
        message = f"sgl_kernel::toy_scale_cpu: {argument}: expected {expected}, got another"
        raise RuntimeError(message)
    floats = (torch.float32, torch.bfloat16, torch.float16)
    if input.layout != torch.strided or input.dtype not in floats or not input.is_contiguous():
        fail("input", "a contiguous tensor of floats")
    used = torch.tensor(factor, dtype=torch.float32).item()
    if used - used != 0 or (factor != 0 and abs(used) < 2.0**-126):
        fail("factor", "a finite number")
    if torch.is_grad_enabled() and input.requires_grad:
        fail("input", "no gradient")
    return (input.double() * factor).to(input.dtype)

torch.ops.load_library("sgl-kernel-cpu/sgl_kernel/sgl_kernel_ops.so")
schemas = re.findall(r'SGL_OP\\(toy_scale_cpu, "(.*)"\\)', open(sys.argv[1]).read())
library = torch.library.Library("sgl_kernel", "FRAGMENT")
library.define("toy_scale_cpu" + schemas[0])
library.impl("toy_scale_cpu", toy_scale, "CompositeExplicitAutograd")
sys.exit(pytest.main(sys.argv[2:]))
"""


def documented_files() -> set[str]:
    """The paths in the table of *Adding an op*, for the family `transformer`."""
    text = (ROOT / "CONTRIBUTING.md").read_text()
    table = text.split("## Adding an op")[1].split("\n1. ")[0]
    rows = [line.split("|")[1] for line in table.splitlines() if line.startswith("| `")]
    found = [path for row in rows for path in re.findall(r"`([^`]+/[^`]+)`", row)]
    return {path.replace("<family>", "transformer") for path in found}


def copy_with_toy(tree: Path) -> None:
    """What the tests of all ops need, with the toy op added."""
    package = Path(sgl_kernel.__file__).parent
    ignore = shutil.ignore_patterns("__pycache__")
    for folder in ("srt", "test/registered/cpu", "sgl-kernel-cpu/sgl_kernel", KERNELS):
        shutil.copytree(ROOT / folder, tree / folder, ignore=ignore)
    for file in ("sgl-kernel-cpu/README.md", "sgl-kernel-cpu/CHANGELOG.md"):
        shutil.copy(ROOT / file, tree / file)
    shutil.copy(package / "sgl_kernel_ops.so", tree / "sgl-kernel-cpu/sgl_kernel")
    for file, edits in EDITS.items():
        text = (tree / file).read_text()
        for where, new in edits:
            assert text.count(where) == 1, f"{file}: {where!r}"
            text = text.replace(where, new)
        (tree / file).write_text(text)


def test_the_toy_touches_what_contributing_lists() -> None:
    patterns = documented_files()
    for file in EDITS:
        assert any(Path(file).match(pattern) for pattern in patterns), f"{file} is not listed"
    assert len(patterns) <= 8
    for pattern in patterns:
        assert list(ROOT.glob(pattern)), f"{pattern}: no such file"


def test_the_toy_passes_the_tests_of_all_ops(tmp_path: Path) -> None:
    copy_with_toy(tmp_path)
    (tmp_path / "built.py").write_text(BUILT)
    tests = tmp_path / "test/registered/cpu"
    files = [str(tests / f"test_kernel_{name}.py") for name in ("schemas", "ops", "fuzz_arguments")]
    places = [str(tmp_path), str(tmp_path / "sgl-kernel-cpu"), os.environ.get("PYTHONPATH", "")]
    done = subprocess.run(
        [sys.executable, "built.py", OPS, "-q", "-k", "toy_scale_cpu or every_op", *files],
        cwd=tmp_path,
        env={**os.environ, "PYTHONPATH": os.pathsep.join(places)},
        capture_output=True,
        text=True,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "toy_scale_cpu" not in done.stdout, done.stdout


@pytest.mark.slow
def test_the_toy_compiles(tmp_path: Path) -> None:
    copy_with_toy(tmp_path)
    compiler = shutil.which(os.environ.get("CXX", "c++"))
    if compiler is None:
        pytest.skip("no C++ compiler")
    include = Path(torch.__file__).parent / "include"
    flags = ["-std=c++17", "-fsyntax-only", "-fvisibility=hidden", "-Wall", "-Wextra", "-Werror"]
    places = [f"-I{tmp_path / KERNELS}", "-isystem", str(include)]
    version = "-DTORCH_TARGET_VERSION=0x020a000000000000"
    subprocess.run([compiler, *flags, *places, version, str(tmp_path / OPS)], check=True)
