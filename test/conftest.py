"""What every test runs under: no network, a fixed seed, threads that share a busy machine, signals
that are not ignored.
"""

import os

# Before anything imports huggingface_hub, which reads this once: a test never reaches for a hub.
os.environ["HF_HUB_OFFLINE"] = "1"
# Before Torch loads OpenMP: its threads spin between parallel regions, and where tests do not have
# the cores to themselves, each spinning thread keeps one that has work waiting (seen: 15 times
# slower).
os.environ.setdefault("OMP_WAIT_POLICY", "passive")

import signal
from pathlib import Path
from types import FrameType

import pytest
import torch

DEMO = Path(__file__).resolve().parent.parent / ".demo"


def _survive(signum: int, frame: FrameType | None) -> None:
    """Unlike SIG_IGN, it is not handed on to processes that are started."""


# A shell ignores SIGINT for what it runs in the background, nohup SIGHUP; tests of signals, and the
# processes that they start, would see none then.
for _signum, _handler in ((signal.SIGINT, signal.default_int_handler), (signal.SIGHUP, _survive)):
    if signal.getsignal(_signum) is signal.SIG_IGN:
        signal.signal(_signum, _handler)


@pytest.fixture(autouse=True)
def _seed() -> None:
    torch.manual_seed(0)


@pytest.fixture(scope="session")
def demo_models() -> Path:
    """Folder of the demo models, SmolLM2-135M-Instruct in bf16 and FP8."""
    if not (DEMO / ".stamp").exists():
        pytest.skip("needs the demo models: make demo-model")
    return DEMO
