"""What is in a checkpoint and whether it would run here, from configuration and headers alone.

Reads no tensor data and imports neither torch nor transformers by itself.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

from srt.configs.kv_layout import get_kv_layout
from srt.configs.text_model import get_text_model
from srt.errors import SrtError
from srt.model_loader.checkpoint import Checkpoint, TensorMeta, has_weights
from srt.model_loader.config_files import CONFIG_FILE, get_architecture, read_config
from srt.model_loader.weight_names import canonical_name, split_tensor_name
from srt.utils.host_memory import read_host_memory

_WEIGHT_SCALES = ("weight_scale", "weight_scale_inv")
UNQUANTIZED = "unquantized"
_FLOATS = ("F64", "F32", "F16", "BF16")


@dataclass(frozen=True)
class DtypeUse:
    """Tensors of one dtype: how many, their elements and bytes."""

    dtype: str
    tensors: int
    elements: int
    nbytes: int


@dataclass(frozen=True)
class ModuleGroup:
    """Modules that are alike but for the layer's number.

    Attributes:
        name: module name with `*` for the numbers, such as `model.layers.*.mlp.up_proj`.
        count: how many there are.
        scheme: `fp8 per-tensor`, `fp8 per-channel`, `fp8 per-block`, `fp8 without scale`, or
            `unquantized`.
        dtype: safetensors dtype code of the weight.
        shape: the weight's.
        scale_shape: the weight scale's, None if there is none.
        scale_dtype: the weight scale's, None if there is none.
    """

    name: str
    count: int
    scheme: str
    dtype: str
    shape: tuple[int, ...]
    scale_shape: tuple[int, ...] | None
    scale_dtype: str | None


@dataclass(frozen=True)
class IgnoredGroup:
    """Tensors that are in the checkpoint and not used, and why."""

    name: str
    count: int
    nbytes: int
    reason: str


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
    """The findings; `problems` says why it does not run here and is empty if it does."""

    path: str
    architecture: str
    scheme: str
    quantization_config: Mapping[str, Any] | None
    has_weights: bool
    parameters: int | None
    files: Mapping[str, int]
    dtypes: list[DtypeUse]
    modules: list[ModuleGroup]
    ignored: list[IgnoredGroup]
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
    architecture = get_architecture(config, directory / CONFIG_FILE)
    quantization = config.get("quantization_config") or config.get("compression_config")
    checkpoint = Checkpoint.open(directory) if has_weights(directory) else None
    metas = list(checkpoint or ())
    text = config.get("text_config") or config
    ignored = _find_ignored(metas, text)
    used = [meta for meta in metas if meta.name not in ignored]
    memory = _memory_use(text, used if checkpoint else None)
    modules = _group_modules(used)
    return Inspection(
        path=str(directory),
        architecture=architecture,
        scheme=_describe_scheme(quantization, modules),
        quantization_config=quantization,
        has_weights=checkpoint is not None,
        parameters=_count_parameters(used) if checkpoint else None,
        files={file.name: file.stat().st_size for file in checkpoint.files} if checkpoint else {},
        dtypes=_count_dtypes(metas),
        modules=modules,
        ignored=_group_ignored(metas, ignored),
        memory=memory,
        problems=_find_problems(config, directory / CONFIG_FILE, checkpoint, memory),
    )


def _find_problems(
    config: Mapping[str, Any],
    file: Path,
    checkpoint: Checkpoint | None,
    memory: MemoryUse,
) -> list[str]:
    """Everything that speaks against running the model here."""
    problems = []
    try:
        get_text_model(config, file)
    except SrtError as error:
        problems.append(str(error))
    try:
        # Its methods multiply with the kernels, which load with it.
        from srt.layers.quantization import get_quantization_config

        quantization = get_quantization_config(config)
        if quantization is not None and checkpoint is not None:
            quantization.adapt_to(checkpoint)
    except SrtError as error:
        problems.append(str(error))
    except (ImportError, OSError) as error:
        problems.append(f"the kernels do not load: {error}")
    if checkpoint is None:
        problems.append("there are no safetensors weights in the directory")
    elif not (config.get("text_config") or config).get("tie_word_embeddings") and not any(
        canonical_name(meta.name) == "lm_head.weight" for meta in checkpoint
    ):
        problems.append("lm_head.weight is missing and the configuration does not tie it")
    if memory.weights and memory.available is not None and memory.weights > memory.available:
        problems.append(
            f"the weights take {memory.weights:,} bytes, {memory.available:,} are available"
        )
    return problems


def _find_ignored(metas: Iterable[TensorMeta], config: Mapping[str, Any]) -> dict[str, str]:
    """Tensor name -> why it is not used."""
    reasons = {}
    for meta in metas:
        name = canonical_name(meta.name)
        parameter = split_tensor_name(name)[1]
        if parameter.endswith("_scale") and parameter not in _WEIGHT_SCALES:
            reasons[meta.name] = "activations and KV cache stay in 16 bits"
        elif config.get("tie_word_embeddings") and name.startswith("lm_head."):
            reasons[meta.name] = "lm_head is tied to the embeddings"
        elif name.endswith(".rotary_emb.inv_freq"):
            reasons[meta.name] = "follows from the configuration"
    return reasons


def _group_ignored(metas: Iterable[TensorMeta], reasons: Mapping[str, str]) -> list[IgnoredGroup]:
    counts: Counter[tuple[str, str]] = Counter()
    sizes: Counter[tuple[str, str]] = Counter()
    for meta in metas:
        if meta.name in reasons:
            key = (_pattern(meta.name), reasons[meta.name])
            counts[key] += 1
            sizes[key] += meta.nbytes
    return [IgnoredGroup(name, n, sizes[name, why], why) for (name, why), n in counts.items()]


def _group_modules(metas: Iterable[TensorMeta]) -> list[ModuleGroup]:
    """Modules that have a weight, in the order of their names, layers counted together."""
    modules: dict[str, dict[str, TensorMeta]] = {}
    for meta in metas:
        module, parameter = split_tensor_name(meta.name)
        modules.setdefault(module, {})[parameter] = meta
    counts: Counter[ModuleGroup] = Counter()
    for module, tensors in sorted(modules.items()):
        weight = tensors.get("weight")
        if weight is None:
            continue
        scale = next((tensors[name] for name in _WEIGHT_SCALES if name in tensors), None)
        group = ModuleGroup(
            name=_pattern(module),
            count=0,
            scheme=_weight_scheme(weight, scale),
            dtype=weight.dtype,
            shape=weight.shape,
            scale_shape=scale.shape if scale else None,
            scale_dtype=scale.dtype if scale else None,
        )
        counts[group] += 1
    return [replace(group, count=count) for group, count in counts.items()]


def _weight_scheme(weight: TensorMeta, scale: TensorMeta | None) -> str:
    if scale is None:
        return UNQUANTIZED if weight.dtype in _FLOATS else f"{_format_name(weight)} without scale"
    if scale.numel == 1:
        granularity = "per-tensor"
    elif scale.numel == weight.shape[0] and scale.shape in ((scale.numel,), (scale.numel, 1)):
        granularity = "per-channel"
    else:
        granularity = "per-block"
    return f"{_format_name(weight)} {granularity}"


def _format_name(weight: TensorMeta) -> str:
    return "fp8" if weight.dtype.startswith("F8_") else weight.dtype.lower()


def _describe_scheme(quantization: Mapping[str, Any] | None, modules: Iterable[ModuleGroup]) -> str:
    """The schemes that the weights have, or, without weights, what the configuration says."""
    schemes = sorted({group.scheme for group in modules} - {UNQUANTIZED})
    if schemes:
        return ", ".join(schemes)
    if not quantization:
        return UNQUANTIZED
    keys = ("quant_method", "format", "quant_algo", "weight_block_size")
    return " ".join(str(quantization[key]) for key in keys if quantization.get(key))


def _count_dtypes(metas: Iterable[TensorMeta]) -> list[DtypeUse]:
    uses: dict[str, DtypeUse] = {}
    for meta in metas:
        use = uses.get(meta.dtype, DtypeUse(meta.dtype, 0, 0, 0))
        uses[meta.dtype] = DtypeUse(
            meta.dtype, use.tensors + 1, use.elements + meta.numel, use.nbytes + meta.nbytes
        )
    return sorted(uses.values(), key=lambda use: -use.nbytes)


def _is_scale(meta: TensorMeta) -> bool:
    return split_tensor_name(meta.name)[1] in _WEIGHT_SCALES


def _count_parameters(used: Iterable[TensorMeta]) -> int:
    """Elements of all weights; scales are no parameters."""
    return sum(meta.numel for meta in used if not _is_scale(meta))


def _memory_use(config: Mapping[str, Any], used: Iterable[TensorMeta] | None) -> MemoryUse:
    context = _positive(config.get("max_position_embeddings"))
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
    return 2 * meta.numel if meta.dtype in _FLOATS else meta.nbytes


def _pattern(name: str) -> str:
    """`name` with `*` for its numbers."""
    return ".".join("*" if part.isdigit() else part for part in name.split("."))
