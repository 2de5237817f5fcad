"""What is in a checkpoint and whether it would run here, from configuration and headers alone.

Reads no tensor data. Whether it runs is not told by rules of its own: everything that happens when
a model is loaded happens here too, up to the point where tensor data is read. That takes Torch,
which is imported once nothing else speaks against running.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from srt.checkpoint.checkpoint import Checkpoint
from srt.checkpoint.config_files import (
    CONFIG_FILE,
    find_quantization,
    get_architecture,
    read_config,
)
from srt.checkpoint.files import blaming
from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.checkpoint.formats.registry import get_quantization_config
from srt.checkpoint.hub_headers import open_headers
from srt.checkpoint.kv_scales import find_kv_scales
from srt.checkpoint.quantization_keys import SKIP_LISTS
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.text_model import TextModel, get_text_model
from srt.checkpoint.unused_tensors import UnusedTensors
from srt.checkpoint.weight_files import INDEX_FILE, has_weights, read_index
from srt.errors import HubError, SrtError
from srt.inspection.findings import Inspection
from srt.inspection.memory_use import count_parameters, memory_use, positive
from srt.inspection.scheme_names import UNQUANTIZED
from srt.inspection.tensor_groups import (
    ModuleGroup,
    count_dtypes,
    count_ignored,
    count_modules,
)
from srt.utils.kernels import load_kernels


def inspect_model(model: str | Path, revision: str | None = None) -> Inspection:
    """Inspects a checkpoint, with or without weights.

    Args:
        model: A directory, or `org/name[@revision]` on the Hub, of which the small files are
            downloaded and of the weights the headers are read.
        revision: Branch, tag or commit on the Hub.

    Raises:
        CheckpointError: The directory, its configuration or its weight files are damaged or absent.
        HubError: As of `resolve_model`.
    """
    with open_headers(model, revision) as directory:
        try:
            # Where loading would not come, since something is wrong before, inspection goes on.
            with blaming("the configuration cannot be used", directory / CONFIG_FILE):
                inspection = _inspect_directory(directory)
        except SrtError as error:
            if str(directory) == str(model):
                raise
            raise HubError(_renamed(str(error), directory, model)) from error
    return replace(
        inspection,
        path=str(model),
        problems=[_renamed(problem, directory, model) for problem in inspection.problems],
    )


def _renamed(text: str, directory: Path, model: str | Path) -> str:
    """`text` with the model's name for the directory in which its headers were."""
    return text.replace(str(directory), str(model))


def _inspect_directory(directory: Path) -> Inspection:
    config = read_config(directory)
    config_file = directory / CONFIG_FILE
    block = find_quantization(config, config_file)
    problems: list[str] = []
    model, quant = _read_model(config, config_file, problems)
    checkpoint = _open_weights(directory, problems)
    metas = list(checkpoint or ())
    ignored = _find_ignored(metas, model)
    used = [meta for meta in metas if meta.name not in ignored]
    memory = memory_use(model.config, used if checkpoint else None)
    block_size = quant.block_size if quant else lambda module: None
    modules = count_modules(used, block_size, block)
    if not problems and checkpoint is not None:
        _check_loading(directory, checkpoint, problems)
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
        parameters=count_parameters(used) if checkpoint else None,
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
        quant = get_quantization_config(config, file=file)
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


def _check_loading(directory: Path, checkpoint: Checkpoint, problems: list[str]) -> None:
    """Adds what would end loading, found by the steps that loading takes."""
    try:
        load_kernels()
        from srt.configs.hf_transformers import load_tokenizer
        from srt.configs.model_config import ModelConfig
        from srt.model_loader.loader import check_model
        from srt.sampling.sampling_defaults import get_sampling_defaults

        config = ModelConfig.from_pretrained(directory)
        get_sampling_defaults(directory)
        load_tokenizer(directory)
        check_model(config, checkpoint)
    except SrtError as error:
        problems.append(str(error))


def _listed_unquantized(block: Mapping[str, Any] | None) -> list[str]:
    lists = [(block or {}).get(key) or [] for key in SKIP_LISTS]
    return [str(name) for names in lists if isinstance(names, list) for name in names]


def _find_ignored(metas: Iterable[TensorMeta], model: TextModel) -> dict[str, str]:
    """Tensor name -> why it is not used."""
    unused = UnusedTensors(
        skipped_modules=model.skipped_modules,
        tied=bool(model.config.get("tie_word_embeddings")),
        num_layers=positive(model.config.get("num_hidden_layers")) or 0,
        num_predicting_layers=positive(model.config.get("num_nextn_predict_layers")) or 0,
    )
    reasons = ((meta.name, unused.reason(meta.name)) for meta in metas)
    return {name: reason for name, reason in reasons if reason is not None}


def _describe_scheme(quantization: Mapping[str, Any] | None, modules: Iterable[ModuleGroup]) -> str:
    """The schemes that the weights have, or, without weights, what the configuration says."""
    schemes = sorted({group.scheme for group in modules} - {UNQUANTIZED})
    if schemes:
        return ", ".join(schemes)
    if not quantization:
        return UNQUANTIZED
    keys = ("quant_method", "format", "quant_algo", "weight_block_size")
    return " ".join(str(quantization[key]) for key in keys if quantization.get(key))
