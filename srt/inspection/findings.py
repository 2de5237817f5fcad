"""What an inspection finds."""

from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any

from srt.inspection.scheme_names import UNQUANTIZED
from srt.inspection.tensor_groups import DtypeUse, IgnoredGroup, ModuleGroup


@dataclass(frozen=True)
class MemoryUse:
    """Bytes that running takes; None where the files do not tell.

    Attributes:
        weights: weights and scales as they are held for running.
        kv_per_token: keys and values of one token, in 16 bits.
        context_length: the model's longest sequence, in tokens.
        kv_context: keys and values of one sequence of that length.
        available: what this machine, or this process's cgroup, has left.
    """

    weights: int | None
    kv_per_token: int | None
    context_length: int | None
    kv_context: int | None
    available: int | None


@dataclass(frozen=True)
class Inspection:
    """The findings.

    Attributes:
        path: the directory, or the name on the Hub.
        architecture: as the configuration names it.
        scheme: of the weights, or what the configuration says where there are none.
        quantization_config: the configuration's block, or None.
        listed_unquantized: modules that the configuration lists as unquantized, as it spells them.
        has_weights: whether the directory holds weights.
        parameters: elements of all weights, scales not counted.
        files: sizes of the weight files.
        dtypes: tensors by dtype.
        modules: modules with a weight.
        ignored: tensors that are not used.
        kv_scale_layers: layers that carry scales for an FP8 KV cache.
        memory: what running takes.
        problems: why it does not run here; empty if it does.
    """

    path: str
    architecture: str
    scheme: str
    quantization_config: Mapping[str, Any] | None
    listed_unquantized: list[str]
    has_weights: bool
    parameters: int | None
    files: Mapping[str, int]
    dtypes: list[DtypeUse]
    modules: list[ModuleGroup]
    ignored: list[IgnoredGroup]
    kv_scale_layers: int
    memory: MemoryUse
    problems: list[str] = field(default_factory=list)

    @property
    def runs_here(self) -> bool:
        """Whether nothing speaks against running it on this machine."""
        return not self.problems

    @property
    def unquantized_modules(self) -> list[str]:
        """Names of the modules whose weight is not quantized."""
        return [group.name for group in self.modules if group.scheme == UNQUANTIZED]

    def to_dict(self) -> dict[str, Any]:
        """For JSON: all attributes and what follows from them."""
        return {
            **asdict(self),
            "unquantized_modules": self.unquantized_modules,
            "runs_here": self.runs_here,
        }
