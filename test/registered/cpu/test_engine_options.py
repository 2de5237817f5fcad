"""Options of an engine that cannot be: one error each, before anything is loaded."""

import math
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from srt import Engine, SamplingParams
from srt.errors import OptionError, RequestError, SrtError
from srt.model_loader.packed_cache import PackedCache
from srt.quantize.quantizer import _natural_key
from srt.test.ci_register import register_cpu_ci
from srt.utils.threads import MAX_THREADS, plan_threads

register_cpu_ci(est_time=6, suite="per-commit")

INTEGERS = (
    "max_running_requests",
    "max_total_tokens",
    "chunked_prefill_size",
    "context_length",
    "num_threads",
)
NO_INTEGERS = ("4", 2.5, True, math.nan, 0, -1, [4], np.array(4))


@pytest.mark.parametrize("value", NO_INTEGERS, ids=repr)
@pytest.mark.parametrize("name", INTEGERS)
def test_integers(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"^{name}: expected an integer"):
        # There is no checkpoint: whatever looks for one raises another error.
        Engine(tmp_path / "none", **{name: value})


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("max_running_requests", None),
        ("max_running_requests", 10**30),
        ("chunked_prefill_size", None),
        ("num_threads", 10**6),  # more than a process can have, which ends it
        ("num_threads", 10**30),
        ("compiled_batch_sizes", "1"),
        ("compiled_batch_sizes", 4),
        ("compiled_batch_sizes", [1, "2"]),
        ("compiled_batch_sizes", [0]),
        ("mem_fraction", "0.5"),
        ("mem_fraction", None),
        ("mem_fraction", 0.0),
        ("mem_fraction", 1.1),
        ("mem_fraction", math.nan),
        ("dtype", None),
        ("dtype", torch.float16),
        ("kv_cache_dtype", []),
        ("quantization", 8),
        ("revision", b"main"),
        ("packed_cache", ""),
        ("packed_cache", 5),
        ("packed_cache", b"cache"),
        ("packed_cache", "a\0b"),
    ],
    ids=repr,
)
def test_others(name: str, value: Any, tmp_path: Path) -> None:
    with pytest.raises(OptionError, match=rf"^{name}: expected "):
        Engine(tmp_path / "none", **{name: value})


@pytest.mark.parametrize("path", [None, 5, b"model", ["model"], "", "a\0b"], ids=repr)
def test_model_path(path: Any) -> None:
    with pytest.raises(OptionError, match=r"^model_path: expected a path, found "):
        Engine(path)


def test_name_of_a_packed_cache_that_no_directory_can_have() -> None:
    with pytest.raises(SrtError, match=r"^packed cache x+ .* cannot be used: File name too long"):
        PackedCache(Path("x" * 600), None, {}, [])  # type: ignore[arg-type]


@pytest.mark.parametrize("text", ["\u00b2", "9" * 5000, str(MAX_THREADS + 1), "0", "-1", "all"])
def test_number_of_threads_from_the_environment(text: str) -> None:
    plan = plan_threads(None, affinity=[0], environ={"OMP_NUM_THREADS": text})
    assert plan.threads == 1
    assert plan.reason != "OMP_NUM_THREADS"
    assert plan_threads(None, affinity=[0], environ={"OMP_NUM_THREADS": "3"}).threads == 3


@pytest.mark.parametrize("value", [np.array(3), torch.tensor(3), np.ma.masked], ids=repr)
@pytest.mark.parametrize("name", ["stop_token_ids", "stop"])
def test_arrays_without_a_dimension_are_no_lists(name: str, value: Any) -> None:
    with pytest.raises(RequestError, match=f"sampling parameter {name}: expected "):
        SamplingParams(**{name: value})


@pytest.mark.parametrize("value", [np.array([3, 5]), torch.tensor([3, 5])], ids=repr)
def test_arrays_of_stop_tokens(value: Any) -> None:
    assert SamplingParams(stop_token_ids=value).stop_token_ids == (3, 5)


@pytest.mark.parametrize("part", ["\u00b2", "\u0663", "9" * 5000])
def test_tensor_names_that_only_look_like_numbers_can_be_sorted(part: str) -> None:
    names = [f"model.layers.{part}.x", "model.layers.10.x", "model.layers.2.x"]
    ordered = sorted(names, key=_natural_key)
    assert ordered.index(names[2]) < ordered.index(names[1])
