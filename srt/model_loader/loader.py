"""From checkpoint to model: match all tensors by their headers, then load and pack module by
module.

Nothing is read before every tensor has its place and every place its tensor. Source pages are
released on the way, so that peak memory stays near the size of the checkpoint.
"""

import logging
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING

import torch
from torch import Tensor, nn

from srt.checkpoint.checkpoint import Checkpoint, TensorMeta
from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.files import blaming
from srt.checkpoint.formats.fp8_checkpoint import check_unquantized
from srt.checkpoint.mistral_form import to_hf_rows
from srt.checkpoint.registry import get_model_class
from srt.checkpoint.weight_names import canonical_name, split_tensor_name
from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError
from srt.layers.float32 import use_float32
from srt.layers.parameter import ModelParameter, ShardId
from srt.layers.quantization.base_config import QuantizationConfig
from srt.layers.quantization.mixed_linear import LinearPart
from srt.utils.huge_pages import HugePageArena
from srt.utils.progress import byte_bar

if TYPE_CHECKING:
    from srt.model_loader.packed_cache import PackedCache

logger = logging.getLogger(__name__)

# Mapped source bytes that may stay resident before they are released.
_RELEASE_BYTES = 16 << 20


@dataclass
class _ModulePlan:
    """The tensors of one module: (parameter's name, shard, header of the tensor that fills it)."""

    name: str
    module: nn.Module
    # The module in which the checkpoint has the shards of a merged layer.
    parent: str
    sources: list[tuple[str, ShardId, TensorMeta]] = field(default_factory=list)


def load_model(
    config: ModelConfig, *, progress: bool = True, packed_cache: Path | None = None
) -> nn.Module:
    """The model of a checkpoint, packed and ready to run.

    Args:
        config: What the checkpoint's configuration says.
        progress: Show a progress bar on stderr if that is a terminal.
        packed_cache: Directory in which packed weights are kept for the next start.

    Raises:
        CheckpointError: A tensor is missing, unknown, or of the wrong shape, dtype or value.
        UnsupportedConfigError: The configuration asks for what the architecture here does not do.
    """
    with Checkpoint.open(config.path) as checkpoint:
        model, plans = _plan_model(config, checkpoint)
        if packed_cache is None:
            _load_modules(plans, checkpoint, config, progress, record=None)
        else:
            cache = _open_cache(packed_cache, checkpoint, config, plans, progress)
            if not cache.restore(model):
                cache.start_recording()
                _load_modules(plans, checkpoint, config, progress, record=cache.record)
                cache.store(model)
    return model.eval()


def check_model(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Goes as far as loading goes by headers: builds the model without memory for its parameters
    and matches every tensor to one. What only values tell, such as a scale of 0, stays open.

    Raises:
        CheckpointError, UnsupportedConfigError: As `load_model`, with the same message.
    """
    _plan_model(config, checkpoint)


def _plan_model(config: ModelConfig, checkpoint: Checkpoint) -> tuple[nn.Module, list[_ModulePlan]]:
    """The model with its parameters on the meta device, and what is to fill them."""
    quant = config.quant_config.adapt_to(checkpoint) if config.quant_config else None
    if quant is None:
        check_unquantized(checkpoint)
    _check_layers(config, checkpoint)
    # Parameters get memory only while they are loaded.
    with (
        blaming("no model can be built as the configuration says", config.path / CONFIG_FILE),
        torch.device("meta"),
    ):
        model: nn.Module = get_model_class(config.architecture)(config, quant)
    if config.dtype is torch.float32:
        use_float32(model)
    return model, _match(model, checkpoint, quant)


def _check_layers(config: ModelConfig, checkpoint: Checkpoint) -> None:
    """Compares the number of layers with the tensors' names, before thousands are built in vain."""
    names = (canonical_name(meta.name).split(".", 2) for meta in checkpoint)
    present = {parts[1] for parts in names if len(parts) == 3 and parts[0] == "layers"}
    missing = next((i for i in range(config.num_hidden_layers) if str(i) not in present), None)
    if missing is not None:
        raise CheckpointError(
            f"layer {missing} of the model has no tensor",
            file=config.path,
            expected=f"{config.num_hidden_layers} layers, as {CONFIG_FILE} says",
            found=f"tensors of {len(present)} layers",
        )


def _open_cache(
    directory: Path,
    checkpoint: Checkpoint,
    config: ModelConfig,
    plans: list[_ModulePlan],
    progress: bool,
) -> "PackedCache":
    from srt.model_loader.packed_cache import PackedCache, cache_key  # few starts need them

    places = [
        (
            plan.name,
            type(plan.module).__name__,
            type(getattr(plan.module, "quant_method", None)).__name__,
            [(name, str(p.dtype), p.shape) for name, p in plan.module.named_parameters()],
            [(name, shard, meta.name, meta.dtype) for name, shard, meta in plan.sources],
        )
        for plan in plans
    ]
    options = {"dtype": str(config.dtype), "quantization": config.quantization}
    key = cache_key(config.path, options, places)
    tensors = [meta.name for plan in plans for _, _, meta in plan.sources]
    return PackedCache(directory, checkpoint, key, tensors, progress=progress)


def _load_modules(
    plans: list[_ModulePlan],
    checkpoint: Checkpoint,
    config: ModelConfig,
    progress: bool,
    record: Callable[[str, Tensor], None] | None,
) -> None:
    """Fills and packs all modules; `record` is called with each tensor that is read."""
    total = sum(meta.nbytes for plan in plans for _, _, meta in plan.sources)
    with byte_bar(total, "Loading weights", enabled=progress) as bar, torch.no_grad():
        unreleased = 0
        arena = HugePageArena()
        for plan in plans:
            nbytes = _load_module(plan, checkpoint, config, record, arena)
            bar.update(nbytes)
            unreleased += nbytes
            if unreleased >= _RELEASE_BYTES:
                checkpoint.release()
                unreleased = 0


def _match(
    model: nn.Module, checkpoint: Checkpoint, quant: QuantizationConfig | None
) -> list[_ModulePlan]:
    """Plans in the model's order. Raises CheckpointError unless tensors and parameters match one to
    one.
    """
    plans: dict[str, _ModulePlan] = {}
    places: dict[
        str, tuple[str, str, ShardId]
    ] = {}  # canonical tensor name -> module, parameter, shard
    for module_name, module in model.named_modules():
        parent = _parent_of_shards(module_name, module)
        for name, parameter in module.named_parameters(recurse=False):
            assert isinstance(parameter, ModelParameter), f"{module_name}.{name} cannot be loaded"
            plans.setdefault(module_name, _ModulePlan(module_name, module, parent))
            places[canonical_name(f"{module_name}.{name}")] = (module_name, name, None)
            for shard in parameter.shards:
                source = canonical_name(f"{parent}.{shard}.{name}")
                places[source] = (module_name, name, shard)

    filled: dict[tuple[str, str, ShardId], TensorMeta] = {}
    is_unused: Callable[[str], bool] = model.is_unused_tensor  # type: ignore[assignment]
    skipped = 0
    for meta in checkpoint:
        name = canonical_name(meta.name)
        owner, parameter_name = split_tensor_name(name)
        wanted = quant.parameter_name(parameter_name) if quant else parameter_name
        if wanted is None or is_unused(name):
            skipped += 1
            continue
        place = places.get(f"{owner}.{wanted}")
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
    plan: _ModulePlan,
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


def _load_module(
    plan: _ModulePlan,
    checkpoint: Checkpoint,
    config: ModelConfig,
    record: Callable[[str, Tensor], None] | None,
    arena: HugePageArena,
) -> int:
    """Fills and packs one module; returns the bytes read."""
    nbytes = 0
    loading = {
        name: parameter.materialize(arena)
        for name, parameter in plan.module.named_parameters(recurse=False)
        if isinstance(parameter, ModelParameter)
    }
    for name, shard, meta in plan.sources:
        stored = checkpoint.get(meta.name)
        if record is not None:
            record(meta.name, stored)
        source = to_hf_rows(
            meta,
            stored,
            num_heads=config.num_attention_heads,
            num_kv_heads=config.num_kv_heads,
            head_dim=config.head_dim,
        )
        loading[name].load(source, meta, shard)
        del stored, source
        nbytes += meta.nbytes
    for name, parameter in loading.items():
        setattr(plan.module, name, nn.Parameter(parameter.data, requires_grad=False))
    del loading
    process = getattr(plan.module, "process_weights_after_loading", None)
    if process is not None:
        process()
    return nbytes
