"""The schemas of the ops: compared with those that SGLang registered, and with the wrappers."""

import inspect
import re
import subprocess
import sys
import typing
from pathlib import Path
from types import NoneType
from typing import Any

import pytest
import torch
from torch import Tensor

import sgl_kernel
from srt.test.ci_register import register_cpu_ci
from srt.test.kernels import all_ops

register_cpu_ci(est_time=8, suite="per-commit")

ROOT = Path(__file__).parents[3]
RECORDED = Path(__file__).parent / "data" / "sglang_cpu_schemas_2026_08.txt"

# Where ours differ from SGLang's by more than arguments at the end that have defaults.
DIFFERENCES = {
    "fused_add_rmsnorm_cpu": "SGLang has one alias set for two tensors that are not aliases",
    "store_cache_cpu": "one alias set for both caches there, and no default of row_dim",
    "rotary_embedding_cpu": "SGLang's schema does not say that it writes its arguments",
    "decode_attention_cpu": "ours has no cross attention, says that it writes the caches, takes "
    "calls that have nothing to store",
    "extend_attention_cpu": "ours has no cross attention and no tree of drafts",
}


def recorded_schemas() -> dict[str, torch._C.FunctionSchema]:
    """SGLang's, by name."""
    lines = [line for line in RECORDED.read_text().splitlines() if not line.startswith("#")]
    schemas = [torch._C.parse_schema(line) for line in lines]
    return {schema.name: schema for schema in schemas}


SGLANG = recorded_schemas()


def live_schema(op: str) -> Any:
    """The schema that the library registered."""
    return getattr(torch.ops.sgl_kernel, op).default._schema


def parts(schema: Any) -> tuple[list[str], str]:
    """Its arguments, such as `Tensor(a!)? x=None`, and its results."""
    found = re.fullmatch(r"[\w:]+\((.*)\) -> (.*)", str(schema))
    assert found is not None, schema
    return found[1].split(", "), found[2]


def begins_as(ours: Any, theirs: Any) -> bool:
    """Whether our schema is theirs, with more arguments at the end that have defaults."""
    (arguments, results), (expected, expected_results) = parts(ours), parts(theirs)
    more = arguments[len(expected) :]
    return (
        arguments[: len(expected)] == expected
        and all("=" in argument for argument in more)
        and results == expected_results
    )


@pytest.mark.parametrize("op", [op for op in all_ops() if op in SGLANG])
def test_what_sglang_has_is_called_as_there(op: str) -> None:
    ours, theirs = live_schema(op), SGLANG[op]
    assert begins_as(ours, theirs) == (op not in DIFFERENCES), f"{ours}\nSGLang: {theirs}"


@pytest.mark.parametrize("op", [op for op in DIFFERENCES if not op.endswith("attention_cpu")])
def test_differences_leave_names_types_and_places(op: str) -> None:
    ours, theirs = live_schema(op), SGLANG[op]
    for mine, other in zip(ours.arguments, theirs.arguments, strict=False):
        assert (mine.name, str(mine.type)) == (other.name, str(other.type))
    assert all(a.has_default_value() for a in ours.arguments[len(theirs.arguments) :])


def test_every_difference_is_of_an_op_that_both_have() -> None:
    assert set(DIFFERENCES) <= set(all_ops()) & set(SGLANG)


PYTHON_TYPES = {
    "Tensor": Tensor,
    "int": int,
    "float": float,
    "bool": bool,
    "int[]": list[int],
    "ScalarType": torch.dtype,
}


def python_type(argument: str) -> Any:
    """The type that a wrapper has for an argument of a schema, such as `Tensor(a!)? x=None`."""
    kind = re.sub(r"\(.*?\)", "", argument.split(" ")[0])
    found = PYTHON_TYPES[kind.removesuffix("?")]
    return found | None if kind.endswith("?") else found


@pytest.mark.parametrize("op", all_ops())
def test_wrapper_has_the_signature_of_the_schema(op: str) -> None:
    """So what mypy accepts is what the op takes."""
    wrapper = getattr(sgl_kernel, op)
    schema, signature = live_schema(op), inspect.signature(wrapper)
    hints = typing.get_type_hints(wrapper)
    assert [a.name for a in schema.arguments] == [*signature.parameters]
    for argument, text, parameter in zip(
        schema.arguments, parts(schema)[0], signature.parameters.values(), strict=True
    ):
        assert hints[parameter.name] == python_type(text), parameter
        default = argument.default_value if argument.has_default_value() else parameter.empty
        assert default == parameter.default, parameter
    results = [NoneType, Tensor, tuple[Tensor, Tensor]]
    assert hints["return"] == results[len(schema.returns)]
    assert wrapper.__doc__


def test_the_package_offers_the_ops_and_little_else() -> None:
    others = {"Arena", "RecordingError", "StepGraph", "__version__", "cpu_info", "fakes"}
    others |= {"packed_index", "record", "set_isa", "unpack_rows"}
    assert sorted(sgl_kernel.__all__) == sorted([*all_ops(), *others])
    assert all(hasattr(sgl_kernel, name) for name in sgl_kernel.__all__)


def test_ops_are_called_by_their_wrappers_only() -> None:
    """`torch.ops.sgl_kernel` passes mypy by: besides tests only the package itself looks there."""
    sources = [
        path
        for folder in ("srt", "scripts", "sgl-kernel-cpu/benchmark")
        for path in sorted((ROOT / folder).rglob("*.py"))
        if not path.is_relative_to(ROOT / "srt/test")
    ]
    assert len(sources) > 100
    found = [path for path in sources if re.search(r"ops\.sgl_kernel\b", path.read_text())]
    assert not found, "call the wrapper of sgl_kernel"


IMPORTING_REGISTERS_NO_FAKE = """
import torch
import sgl_kernel

def fakes():
    names = [n for n in torch._C._dispatch_get_all_op_names() if n.startswith("sgl_kernel::")]
    entries = [torch._library.simple_registry.singleton.find(name) for name in names]
    return [entry.fake_impl.kernel is not None for entry in entries]

assert len(fakes()) > 0 and not any(fakes()), "importing registered a fake kernel"
sgl_kernel.fakes.register()
sgl_kernel.fakes.register()
assert all(fakes()), "an op has no fake kernel"
"""


def test_fakes_are_registered_on_demand_only() -> None:
    subprocess.run([sys.executable, "-c", IMPORTING_REGISTERS_NO_FAKE], check=True)
