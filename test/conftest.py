"""What every test runs under: no network, a fixed seed, threads that share a busy machine."""

import os

# Before anything imports huggingface_hub, which reads this once: a test never reaches for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before Torch loads OpenMP: its threads spin between parallel regions, and where tests do not have
# the cores to themselves, each spinning thread keeps one that has work waiting (seen: 15 times
# slower).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

from pathlib import Path

import pytest
import torch

DEMO = Path(__file__).resolve().parent.parent / ".demo"


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_models() -> Path:
    """Folder of the demo models, SmolLM2-135M-Instruct in bf16 and FP8."""
    if not (DEMO / ".stamp").exists():
        pytest.skip("needs the demo models: make demo-model")
    return DEMO
