"""The Python recipes of docs/cookbook.md and README.md run as they stand."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=90, suite="full")

ROOT = Path(__file__).resolve().parents[3]


def recipes() -> list[object]:
    """Each Python block of the pages, with the line it starts at as its name."""
    found: list[object] = []
    for page in ("README.md", "docs/cookbook.md", "sgl-kernel-cpu/README.md"):
        text = (ROOT / page).read_text(encoding="utf-8")
        for match in re.finditer(r"^```python\n(.*?)^```$", text, re.MULTILINE | re.DOTALL):
            line = text.count("\n", 0, match.start()) + 1
            found.append(pytest.param(match[1], id=f"{page}:{line}"))
    return found


@pytest.mark.parametrize("code", recipes())
def test_recipe_runs(code: str, demo_models: Path) -> None:
    result = subprocess.run(
        [sys.executable, "-"],
        input=code,
        cwd=demo_models.parent,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert result.returncode == 0, result.stderr
    assert result.stdout.strip(), "a recipe prints what it shows"
