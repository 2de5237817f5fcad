"""Which tensor of a checkpoint fills which parameter of a model, told by headers alone."""

import logging
from dataclasses import dataclass, field

from torch import nn

from srt.checkpoint.checkpoint import Checkpoint
from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.unused_tensors import UnusedTensors
from srt.checkpoint.weight_names import canonical_name, split_tensor_name
from srt.errors import CheckpointError
from srt.layers.parameter import ModelParameter, ShardId
from srt.layers.quantization.mixed_linear import LinearPart

logger = logging.getLogger(__name__)


@dataclass
class ModulePlan:
    """The tensors of one module.

    Attributes:
        name: The module's full name.
        module: The module itself.
        parent: The module in which the checkpoint has the shards of a merged layer.
        sources: Parameter's name, shard, and header of the tensor that fills it.
    """

    name: str
    module: nn.Module
    parent: str
    sources: list[tuple[str, ShardId, TensorMeta]] = field(default_factory=list)


def match_tensors(
    model: nn.Module,
    checkpoint: Checkpoint,
    quant: QuantizationConfig | None,
    unused: UnusedTensors,
) -> list[ModulePlan]:
    """Plans in the model's order. Raises CheckpointError unless parameters and tensors, but for the
    unused ones, match one to one.
    """
    plans: dict[str, ModulePlan] = {}
    # Canonical tensor name -> module, parameter, shard.
    places: dict[str, tuple[str, str, ShardId]] = {}
    for module_name, module in model.named_modules():
        parent = _parent_of_shards(module_name, module)
        for name, parameter in module.named_parameters(recurse=False):
            assert isinstance(parameter, ModelParameter), f"{module_name}.{name} cannot be loaded"
            plans.setdefault(module_name, ModulePlan(module_name, module, parent))
            places[canonical_name(f"{module_name}.{name}")] = (module_name, name, None)
            for shard in parameter.shards:
                source = canonical_name(f"{parent}.{shard}.{name}")
                places[source] = (module_name, name, shard)

    filled: dict[tuple[str, str, ShardId], TensorMeta] = {}
    skipped = 0
    for meta in checkpoint:
        if unused.reason(meta.name) is not None:
            skipped += 1
            continue
        owner, name = split_tensor_name(canonical_name(meta.name))
        place = places.get(f"{owner}.{quant.parameter_name(name) if quant else name}")
        if place is None:
            raise CheckpointError(
                "a tensor belongs to no parameter of the model",
                file=meta.file,
                tensor=meta.name,
                expected=f"a tensor of {type(model).__name__}",
                found=f"{meta.dtype} {list(meta.shape)}",
            )
        if place in filled:
            raise CheckpointError(
                "two tensors fill the same parameter",
                file=meta.file,
                tensor=meta.name,
                expected="one of them",
                found=f"also {filled[place].name} in {filled[place].file.name}",
            )
        filled[place] = meta
    if skipped:
        logger.info("%d tensors of the checkpoint are not needed", skipped)

    for plan in plans.values():
        for name, parameter in plan.module.named_parameters(recurse=False):
            assert isinstance(parameter, ModelParameter)
            for shard_id in _filled_shards(checkpoint, plan, name, parameter, filled):
                meta = filled[(plan.name, name, shard_id)]
                parameter.check(meta, shard_id)
                plan.sources.append((name, shard_id, meta))
    return list(plans.values())


def _parent_of_shards(name: str, module: nn.Module) -> str:
    """The module in which a checkpoint has the shards of a merged layer: that which holds the
    layer, also for a part of it (`qkv_proj.parts.0`).
    """
    levels = 3 if isinstance(module, LinearPart) else 1
    return ".".join(name.split(".")[:-levels])


def _filled_shards(
    checkpoint: Checkpoint,
    plan: ModulePlan,
    name: str,
    parameter: ModelParameter,
    filled: dict[tuple[str, str, ShardId], TensorMeta],
) -> list[ShardId]:
    """The shards that fill a parameter: the whole, or all of its parts."""
    module_name, parent = plan.name, plan.parent
    found = [shard for shard in (None, *parameter.shards) if (module_name, name, shard) in filled]
    if found == [None] or (found and found == list(parameter.shards)):
        return found
    if None in found:
        raise CheckpointError(
            "a merged tensor and its parts are both present",
            file=checkpoint.path,
            tensor=filled[(module_name, name, None)].name,
            expected="one or the other",
            found=", ".join(filled[(module_name, name, shard)].name for shard in found),
        )
    missing = [shard for shard in parameter.shards if shard not in found]
    raise CheckpointError(
        "a parameter of the model has no tensor",
        file=checkpoint.path,
        tensor=f"{parent}.{missing[0]}.{name}" if missing else f"{module_name}.{name}",
        expected=list(parameter.shard_shape(missing[0] if missing else None)),
        found="no such tensor",
    )
