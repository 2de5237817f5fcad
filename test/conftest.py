"""What every test runs under: no network, a fixed seed."""

import os

# Before anything imports huggingface_hub, which reads this once: a test never reaches for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"

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
