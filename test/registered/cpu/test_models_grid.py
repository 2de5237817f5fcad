"""Every architecture in every format, also where nobody has published it: the whole grid of
test_models.py.
"""

from pathlib import Path

import pytest

from srt.test.ci_register import register_cpu_ci
from srt.test.fp8_checkpoints import FORMATS
from srt.test.model_cases import PUBLISHED, TOLERANCES, largest_difference, make_case
from srt.test.tiny_models import ARCHITECTURES

register_cpu_ci(est_time=60, suite="full")

# Mistral's own form has no words for what these have.
_NOT_MISTRAL = set(ARCHITECTURES) - {"llama-tied", "mistral", "ministral3"}
PAIRS = [
    (fmt, architecture)
    for fmt in FORMATS
    for architecture in ARCHITECTURES
    if architecture not in PUBLISHED[fmt]
    and not (FORMATS[fmt].mistral_form and architecture in _NOT_MISTRAL)
]


@pytest.mark.parametrize(("fmt", "architecture"), PAIRS, ids=map("-".join, PAIRS))
def test_log_probabilities(fmt: str, architecture: str, tmp_path: Path) -> None:
    case = make_case(tmp_path, fmt, architecture)
    differences = {dtype: largest_difference(case, dtype) for dtype in TOLERANCES}
    assert all(differences[dtype] < limit for dtype, limit in TOLERANCES.items()), differences
