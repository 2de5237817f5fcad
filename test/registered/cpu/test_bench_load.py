"""The benchmark of loading, and that a checkpoint of 300 MB takes no more memory than promised."""

import json
import subprocess
import sys
from importlib.util import module_from_spec, spec_from_file_location
from pathlib import Path
from typing import Any

import pytest

from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=40, suite="full")

SCRIPT = Path(__file__).parents[3] / "scripts" / "bench_load.py"


def load_script() -> Any:
    spec = spec_from_file_location("bench_load", SCRIPT)
    assert spec is not None
    assert spec.loader is not None
    module = module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("tied", [True, False])
def test_memory_of_loading(tmp_path: Path, tied: bool) -> None:
    bench = load_script()
    changes = {"num_hidden_layers": 4, "vocab_size": 16_000, "tie_word_embeddings": tied}
    bench.write_checkpoint(tmp_path, bench.LLAMA_1B | changes, max_shard_size=100_000_000)
    assert len(list(tmp_path.glob("*.safetensors"))) >= 3
    command = [sys.executable, str(SCRIPT), "--model", str(tmp_path), "--rounds", "1", "--json"]
    result = subprocess.run(command, stdout=subprocess.PIPE, text=True, check=False)
    facts = json.loads(result.stdout)
    assert facts["checkpoint_bytes"] > 300e6
    assert facts["peak_rss_bytes"] <= 1.2 * facts["checkpoint_bytes"] + 400e6
    assert facts["within_bounds"] == (result.returncode == 0)
    # The second start maps the weights: their pages count, but once.
    assert facts["medians"]["second start"]["peak_rss_bytes"] < facts["peak_rss_bound_bytes"]
