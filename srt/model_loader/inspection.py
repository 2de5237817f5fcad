"""What is in a checkpoint and whether it would run here, from configuration and headers alone.

Reads no tensor data and imports neither torch nor transformers by itself.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from srt.configs.context_length import get_context_length
from srt.configs.kv_layout import get_kv_layout
from srt.configs.quantization_keys import SKIP_LISTS
from srt.configs.text_model import TextModel, get_text_model
from srt.errors import SrtError
from srt.layers.quantization import QuantizationConfig, get_quantization_config
from srt.layers.quantization.fp8_checkpoint import (
    UNUSED_SCALE_NAMES,
    WEIGHT_SCALE_NAMES,
    Fp8CheckpointConfig,
    check_unquantized,
)
from srt.layers.quantization.kv_scales import find_kv_scales
from srt.model_loader.checkpoint import INDEX_FILE, Checkpoint, TensorMeta, has_weights, read_index
from srt.model_loader.config_files import (
    CONFIG_FILE,
    find_quantization,
    get_architecture,
    read_config,
)
from srt.model_loader.tensor_groups import (
    FLOATS,
    UNQUANTIZED,
    DtypeUse,
    IgnoredGroup,
    ModuleGroup,
    count_dtypes,
    count_ignored,
    count_modules,
)
from srt.model_loader.weight_names import canonical_name, is_derived_buffer, split_tensor_name
from srt.utils.host_memory import read_host_memory

# Missing layers that are listed one by one.
_LISTED = 20


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
        path: the directory.
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


def inspect_model(path: str | Path) -> Inspection:
    """Inspects a checkpoint directory, with or without weights.

    Raises:
        CheckpointError: the directory, its configuration or its weight files are damaged or absent.
    """
    directory = Path(path)
    config = read_config(directory)
    config_file = directory / CONFIG_FILE
    block = find_quantization(config, config_file)
    problems: list[str] = []
    model, quant = _read_model(config, config_file, problems)
    checkpoint = _open_weights(directory, problems)
    metas = list(checkpoint or ())
    ignored = _find_ignored(metas, model)
    used = [meta for meta in metas if meta.name not in ignored]
    memory = _memory_use(model.config, used if checkpoint else None)
    modules = count_modules(
        used, quant.block_size if isinstance(quant, Fp8CheckpointConfig) else lambda module: None
    )
    if checkpoint is not None:
        _check_tensors(metas, model, quant, problems)
    if memory.weights and memory.available is not None and memory.weights > memory.available:
        problems.append(
            f"the weights take {memory.weights:,} bytes, {memory.available:,} are available"
        )
    return Inspection(
        path=str(directory),
        architecture=get_architecture(config, config_file),
        scheme=_describe_scheme(block, modules),
        quantization_config=block,
        listed_unquantized=_listed_unquantized(block),
        has_weights=checkpoint is not None,
        parameters=_count_parameters(used) if checkpoint else None,
        files={file.name: file.stat().st_size for file in checkpoint.files} if checkpoint else {},
        dtypes=count_dtypes(metas),
        modules=modules,
        ignored=count_ignored(metas, ignored),
        kv_scale_layers=len(find_kv_scales(metas)),
        memory=memory,
        problems=problems,
    )


def _read_model(
    config: Mapping[str, Any], file: Path, problems: list[str]
) -> tuple[TextModel, QuantizationConfig | None]:
    """The text model and its format, as far as they are such that run here."""
    quant = None
    try:
        model = get_text_model(config, file)
    except SrtError as error:
        problems.append(str(error))
        model = TextModel(get_architecture(config, file), _text_config(config))
    try:
        quant = get_quantization_config(config)
    except SrtError as error:
        problems.append(str(error))
    return model, quant


def _text_config(config: Mapping[str, Any]) -> Mapping[str, Any]:
    text = config.get("text_config")
    return text if isinstance(text, Mapping) else config


def _open_weights(directory: Path, problems: list[str]) -> Checkpoint | None:
    """The weights, or None if the directory holds only their index, or nothing of them."""
    index = directory / INDEX_FILE
    if not has_weights(directory):
        problems.append("there are no safetensors weights in the directory")
    elif index.is_file() and not any(directory.glob("*.safetensors")):
        count = len(set(read_index(index).values()))
        problems.append(f"none of the {count} weight files that {INDEX_FILE} lists is there")
    else:
        return Checkpoint.open(directory)
    return None


def _check_tensors(
    metas: list[TensorMeta],
    model: TextModel,
    quant: QuantizationConfig | None,
    problems: list[str],
) -> None:
    """Adds what headers tell to be wrong, before any model is built."""
    try:
        if quant is not None:
            quant.adapt_to(metas)
        elif not problems:  # no format, not one that is refused
            check_unquantized(metas)
    except SrtError as error:
        problems.append(str(error))
    names = {canonical_name(meta.name) for meta in metas}
    if not model.config.get("tie_word_embeddings") and not any(
        name.startswith("lm_head.") for name in names
    ):
        problems.append("lm_head.weight is missing and the configuration does not tie it")
    layers = _positive(model.config.get("num_hidden_layers")) or 0
    present = {name.split(".")[1] for name in names if name.startswith("layers.")}
    missing = [str(i) for i in range(min(layers, len(present) + _LISTED)) if str(i) not in present]
    if missing:
        more = " ..." if layers > len(present) + _LISTED else ""
        problems.append(f"there are no tensors of layer {', '.join(missing)}{more}")


def _listed_unquantized(block: Mapping[str, Any] | None) -> list[str]:
    lists = [(block or {}).get(key) or [] for key in SKIP_LISTS]
    return [str(name) for names in lists if isinstance(names, list) for name in names]


def _find_ignored(metas: Sequence[TensorMeta], model: TextModel) -> dict[str, str]:
    """Tensor name -> why it is not used."""
    config = model.config
    layers = _positive(config.get("num_hidden_layers")) or 0
    extra = min(_positive(config.get("num_nextn_predict_layers")) or 0, len(metas))
    predicting = tuple(f"layers.{i}." for i in range(layers, layers + extra))
    skipped = tuple(f"{module}." for module in model.skipped_modules)
    reasons = {}
    for meta in metas:
        name = canonical_name(meta.name)
        if name.startswith(skipped):
            reasons[meta.name] = "text does without"
        elif split_tensor_name(name)[1] in UNUSED_SCALE_NAMES:
            reasons[meta.name] = "activations and KV cache stay in 16 bits"
        elif config.get("tie_word_embeddings") and name.startswith("lm_head."):
            reasons[meta.name] = "lm_head is tied to the embeddings"
        elif is_derived_buffer(name):
            reasons[meta.name] = "follows from the configuration"
        elif name.startswith(predicting):
            reasons[meta.name] = "predicts further tokens, for speculative decoding"
    return reasons


def _describe_scheme(quantization: Mapping[str, Any] | None, modules: Iterable[ModuleGroup]) -> str:
    """The schemes that the weights have, or, without weights, what the configuration says."""
    schemes = sorted({group.scheme for group in modules} - {UNQUANTIZED})
    if schemes:
        return ", ".join(schemes)
    if not quantization:
        return UNQUANTIZED
    keys = ("quant_method", "format", "quant_algo", "weight_block_size")
    return " ".join(str(quantization[key]) for key in keys if quantization.get(key))


def _is_scale(meta: TensorMeta) -> bool:
    return split_tensor_name(meta.name)[1] in WEIGHT_SCALE_NAMES


def _count_parameters(used: Iterable[TensorMeta]) -> int:
    """Elements of all weights; scales are no parameters."""
    return sum(meta.numel for meta in used if not _is_scale(meta))


def _memory_use(config: Mapping[str, Any], used: Iterable[TensorMeta] | None) -> MemoryUse:
    context = get_context_length(config)
    try:
        per_token = _positive(get_kv_layout(config).bytes_per_token(2))
    except (KeyError, TypeError, ZeroDivisionError):
        per_token = None
    return MemoryUse(
        weights=None if used is None else sum(_held_bytes(meta) for meta in used),
        kv_per_token=per_token,
        context_length=context,
        kv_context=per_token * context if per_token and context else None,
        available=read_host_memory().available,
    )


def _positive(value: object) -> int | None:
    """`value` if it is a size, else None: a damaged configuration must not stop an inspection."""
    return value if isinstance(value, int) and value > 0 else None


def _held_bytes(meta: TensorMeta) -> int:
    """Bytes that a tensor takes for running: scales become f32, other wide floats 16 bits."""
    if _is_scale(meta):
        return 4 * meta.numel
    return 2 * meta.numel if meta.dtype in FLOATS else meta.nbytes
