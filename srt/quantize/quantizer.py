"""Writes an FP8 copy of a 16 or 32-bit checkpoint, one tensor at a time.

The result is in Hugging Face's form (`quant_method: fp8`): each linear layer of the decoder holds
`weight` in e4m3 and its scale in f32 (`weight_scale`, or `weight_scale_inv` with a
`weight_block_size`, as DeepSeek-V3 spells it), and everything else stays in 16 bits.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm

from srt.checkpoint.checkpoint import Checkpoint
from srt.checkpoint.config_files import (
    CONFIG_FILE,
    find_quantization,
    is_mistral_form,
    read_config,
)
from srt.checkpoint.dtypes import FLOAT_DTYPES, FP8_DTYPE
from srt.checkpoint.formats.schemes import Scheme
from srt.checkpoint.tensor_meta import TensorMeta
from srt.checkpoint.text_model import get_text_model
from srt.checkpoint.weight_names import is_decoder_module, split_tensor_name
from srt.checkpoint.writer import MAX_SHARD_SIZE, CheckpointWriter, TensorSpec
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.layers.dtypes import TORCH_DTYPES
from srt.layers.quantization.fp8_quantization import QuantizationError, quantize_weight
from srt.model_loader.mapped_checkpoint import MappedCheckpoint
from srt.model_loader.tensors import write_tensor
from srt.quantize.source_snapshot import SourceSnapshot
from srt.utils.directory_replacement import replacing_directory
from srt.utils.files import os_errors_explained


@dataclass(frozen=True)
class WeightReport:
    """One quantized weight: its name, shape `[N, K]`, and what it lost."""

    name: str
    shape: tuple[int, ...]
    error: QuantizationError


def is_quantizable(meta: TensorMeta) -> bool:
    """Whether the tensor is the weight of a linear layer inside a decoder layer."""
    module, parameter = split_tensor_name(meta.name)
    return len(meta.shape) == 2 and parameter == "weight" and is_decoder_module(module)


def scale_name(weight_name: str, scheme: Scheme) -> str:
    """Name of the scale that belongs to `weight_name`: `x.weight` gives `x.weight_scale`."""
    return f"{weight_name.removesuffix('weight')}{scheme.scale_name}"


def quantize_checkpoint(
    source: str | Path,
    destination: str | Path,
    scheme: Scheme,
    *,
    overwrite: bool = False,
    max_shard_size: int = MAX_SHARD_SIZE,
    show_progress: bool = False,
) -> list[WeightReport]:
    """Writes the checkpoint in `source` to `destination` with its linear layers in FP8.

    Written beside `destination` first and renamed at the end, with a manifest: nothing half done is
    left there, and what is replaced is there until then.

    Args:
        source: directory of a bf16, fp16 or f32 checkpoint of a supported architecture.
        destination: directory to create, or to replace.
        scheme: which elements share a scale.
        overwrite: replace a checkpoint at `destination` that this function wrote, if it holds
            nothing else.
        max_shard_size: bytes of tensor data a weight file.
        show_progress: show a progress bar on standard error.

    Returns:
        One report for each quantized weight, in the order of their names.

    Raises:
        UnsupportedConfigError: the architecture is not supported, or the source is in Mistral's own
            form.
        CheckpointError: the source is damaged, is quantized already, changes while it is read, or a
            weight holds NaN or infinity.
        SrtError: `destination` cannot be written (see `replacing_directory`), or something else
            would be lost.
    """
    source, destination = Path(source), Path(destination)
    with os_errors_explained(f"{destination} is not written"):
        before = SourceSnapshot.take(source)
        config = read_config(source)
        if is_mistral_form(source):
            raise UnsupportedConfigError(
                f"{source} is in Mistral's own form; quantize its Hugging Face form, or quantize "
                "it while loading (--quantization)"
            )
        _check_source_config(config, source / CONFIG_FILE)
        with MappedCheckpoint.open(source) as checkpoint:
            _check_source_tensors(checkpoint)
            metas = sorted(checkpoint, key=lambda meta: _natural_key(meta.name))
            specs = [spec for meta in metas for spec in _output_specs(meta, scheme)]
            with replacing_directory(
                destination,
                overwrite=overwrite,
                sources=(source, *before.files),
                nbytes=sum(spec.nbytes for spec in specs) + before.copied_bytes,
            ) as scratch:
                try:
                    with CheckpointWriter(scratch, specs, max_shard_size) as writer:
                        reports = _write_tensors(checkpoint, metas, writer, scheme, show_progress)
                    for file in before.copied:
                        shutil.copyfile(file, scratch / file.name)
                except Exception:
                    before.check()  # the reason may be that somebody changes the source
                    raise
                _write_config(config, metas, scheme, scratch / CONFIG_FILE)
                before.check()
    before.warn_of_directories()
    return reports


def _write_tensors(
    checkpoint: MappedCheckpoint,
    metas: list[TensorMeta],
    writer: CheckpointWriter,
    scheme: Scheme,
    show_progress: bool,
) -> list[WeightReport]:
    reports = []
    bar = tqdm(
        total=checkpoint.nbytes,
        desc=f"quantizing {scheme.name}",
        unit="B",
        unit_scale=True,
        disable=not show_progress,
    )
    with bar:
        for meta in metas:
            tensor = checkpoint.get(meta.name)
            if is_quantizable(meta):
                try:
                    result = quantize_weight(tensor, scheme)
                except ValueError as error:
                    raise _bad_weight(meta, str(error)) from error
                write_tensor(writer, meta.name, result.weight)
                write_tensor(writer, scale_name(meta.name, scheme), result.scale)
                reports.append(WeightReport(meta.name, meta.shape, result.error))
            else:
                if tensor.is_floating_point() and not torch.isfinite(tensor).all():
                    raise _bad_weight(meta, "the weight holds NaN or infinity")
                write_tensor(writer, meta.name, tensor.to(TORCH_DTYPES[_output_dtype(meta)]))
            del tensor
            checkpoint.release()
            bar.update(meta.nbytes)
    return reports


def _bad_weight(meta: TensorMeta, problem: str) -> CheckpointError:
    return CheckpointError(f"cannot quantize: {problem}", file=meta.file, tensor=meta.name)


def _output_dtype(meta: TensorMeta) -> str:
    """What stays unquantized keeps its 16-bit dtype; f32 becomes bf16, whose range is the same."""
    return "BF16" if meta.dtype == "F32" else meta.dtype


def _output_specs(meta: TensorMeta, scheme: Scheme) -> Iterator[TensorSpec]:
    if not is_quantizable(meta):
        yield TensorSpec(meta.name, _output_dtype(meta), meta.shape)
        return
    yield TensorSpec(meta.name, FP8_DTYPE, meta.shape)
    yield TensorSpec(scale_name(meta.name, scheme), "F32", scheme.scale_shape(meta.shape))


def _natural_key(name: str) -> list[tuple[int, str]]:
    """Sorts layer 2 before layer 10."""
    return [
        # Some characters are digits to Python but no numbers, and long numbers are not read.
        (int(part), "") if part.isdecimal() and len(part) < 20 else (-1, part)
        for part in name.split(".")
    ]


def _check_source_tensors(checkpoint: Checkpoint) -> None:
    for meta in checkpoint:
        if meta.dtype in (FP8_DTYPE, "F8_E5M2") or meta.name.endswith("_scale_inv"):
            raise CheckpointError(
                "the source is quantized already",
                file=meta.file,
                tensor=meta.name,
                expected=" or ".join(FLOAT_DTYPES),
                found=meta.dtype,
            )
        if is_quantizable(meta) and meta.dtype not in FLOAT_DTYPES:
            raise CheckpointError(
                "cannot quantize a weight of this dtype",
                file=meta.file,
                tensor=meta.name,
                expected=" or ".join(FLOAT_DTYPES),
                found=meta.dtype,
            )
    if not any(is_quantizable(meta) for meta in checkpoint):
        raise CheckpointError(
            "there is nothing to quantize",
            file=checkpoint.path,
            expected="matrices named layers.N.*.weight",
            found="none",
        )


def _write_config(
    config: dict[str, Any], metas: list[TensorMeta], scheme: Scheme, file: Path
) -> None:
    kept = {_output_dtype(meta) for meta in metas if meta.dtype in FLOAT_DTYPES}
    result = dict(config)
    key = "dtype" if "dtype" in config else "torch_dtype"
    result[key] = "float16" if kept == {"F16"} else "bfloat16"
    result["quantization_config"] = {
        "quant_method": "fp8",
        "fmt": "e4m3",
        "activation_scheme": "dynamic",
        "weight_block_size": list(scheme.block_size) if scheme.block_size else None,
        "modules_to_not_convert": ["lm_head"],
    }
    file.write_text(json.dumps(result, indent=2) + "\n")


def _check_source_config(config: dict[str, Any], file: Path) -> None:
    get_text_model(config, file)
    quantization = find_quantization(config, file)
    if quantization is not None:
        method = quantization.get("quant_method")
        raise CheckpointError(
            "the source is quantized already",
            file=file,
            expected="a bf16, fp16 or f32 checkpoint",
            found=f"quant_method {method}",
        )
