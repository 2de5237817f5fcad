"""From checkpoint to model: match all tensors by their headers, then load and pack module by
module.

Nothing is read before every tensor has its place and every place its tensor. Source pages are
released on the way, so that peak memory stays near the size of the checkpoint.
"""

from collections.abc import Callable
from pathlib import Path

import torch
from torch import Tensor, nn

from srt.checkpoint.checkpoint import Checkpoint
from srt.checkpoint.config_files import CONFIG_FILE
from srt.checkpoint.files import blaming
from srt.checkpoint.formats.fp8_checkpoint import check_unquantized
from srt.checkpoint.weight_names import canonical_name
from srt.configs.model_config import ModelConfig
from srt.errors import CheckpointError
from srt.layers.float32 import use_float32
from srt.layers.parameter import ModelParameter
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
from srt.model_loader.mistral_rows import to_hf_rows
from srt.model_loader.packed_cache import PackedCache
from srt.model_loader.packed_layout import packed_layout_key
from srt.model_loader.tensor_matching import ModulePlan, match_tensors
from srt.models.decoder import CausalLM
from srt.models.registry import get_model_class
from srt.utils.huge_pages import HugePageArena
from srt.utils.progress import byte_bar


def load_model(
    config: ModelConfig, *, progress: bool = True, packed_cache: Path | None = None
) -> CausalLM:
    """The model of a checkpoint, packed and ready to run.

    Args:
        config: What the checkpoint's configuration says.
        progress: Show a progress bar on stderr if that is a terminal.
        packed_cache: Directory in which packed weights are kept for the next start.

    Raises:
        CheckpointError: A tensor is missing, unknown, or of the wrong shape, dtype or value.
        UnsupportedConfigError: The configuration asks for what the architecture here does not do.
    """
    with MappedCheckpoint.open(config.path) as checkpoint:
        model, plans = _plan_model(config, checkpoint)
        if packed_cache is None:
            _load_modules(plans, checkpoint, config, progress, record=None)
        else:
            key = packed_layout_key(config, plans)
            tensors = [meta.name for plan in plans for _, _, meta in plan.sources]
            cache = PackedCache(packed_cache, checkpoint, key, tensors, progress=progress)
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


def _plan_model(config: ModelConfig, checkpoint: Checkpoint) -> tuple[CausalLM, list[ModulePlan]]:
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
        model = get_model_class(config.architecture)(config, quant)
    if config.dtype is torch.float32:
        use_float32(model)
    return model, match_tensors(model, checkpoint, quant, config.unused_tensors)


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


def _load_modules(
    plans: list[ModulePlan],
    checkpoint: MappedCheckpoint,
    config: ModelConfig,
    progress: bool,
    record: Callable[[str, Tensor], None] | None,
) -> None:
    """Fills and packs all modules; `record` is called with each tensor that is read."""
    total = sum(meta.nbytes for plan in plans for _, _, meta in plan.sources)
    with byte_bar(total, "Loading weights", enabled=progress) as bar, torch.no_grad():
        arena = HugePageArena()
        for plan in plans:
            nbytes = _load_module(plan, checkpoint, config, record, arena)
            bar.update(nbytes)
            checkpoint.finish(nbytes)


def _load_module(
    plan: ModulePlan,
    checkpoint: MappedCheckpoint,
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
