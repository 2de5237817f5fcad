"""What a checkpoint directory's config.json and generation_config.json say about the model."""

import logging
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from srt.checkpoint.config_files import CONFIG_FILE, read_config
from srt.checkpoint.context_length import LONGEST_CONTEXT, get_context_length
from srt.checkpoint.files import blaming
from srt.checkpoint.formats.quantization_config import QuantizationConfig
from srt.checkpoint.formats.registry import get_quantization_config
from srt.checkpoint.generation_config import (
    GENERATION_CONFIG_FILE,
    read_eos_token_ids,
    read_generation_config,
)
from srt.checkpoint.kv_layout import KVLayout, get_kv_layout
from srt.checkpoint.text_model import get_text_model
from srt.checkpoint.unused_tensors import UnusedTensors
from srt.configs.dtypes import ACTIVATION_DTYPES
from srt.configs.hf_transformers import load_hf_config
from srt.errors import CheckpointError, UnsupportedConfigError
from srt.utils.tensor_parallel import TensorParallel

logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelConfig:
    """A model's configuration; sizes are in elements, lengths in tokens.

    Attributes:
        path: The checkpoint's directory.
        hf_config: transformers' configuration object of the text model, for what only one
            architecture needs.
        architecture: Name in the model registry.
        dtype: Dtype of activations and KV cache.
        context_length: Longest sequence, prompt and output together.
        tensor_parallel: The ranks that hold the model; sizes are those of all together but for
            `kv_layout`.
        kv_layout: What the KV cache of each rank holds of one token.
        eos_token_ids: Tokens that end a generation, by any of the files; the engine adds those of
            the tokenizer.
        quant_config: The checkpoint's quantization format, or None.
        unused_tensors: Which of the checkpoint's tensors it does without.
        quantization: One of QUANTIZATION_CHOICES, or None: what `quant_config` does to an
            unquantized checkpoint.
    """

    path: Path
    hf_config: Any = field(repr=False)
    architecture: str
    dtype: torch.dtype
    context_length: int
    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    num_kv_heads: int
    head_dim: int
    tensor_parallel: TensorParallel
    kv_layout: KVLayout
    tie_word_embeddings: bool
    eos_token_ids: frozenset[int]
    quant_config: QuantizationConfig | None
    unused_tensors: UnusedTensors
    quantization: str | None = None

    @classmethod
    def from_pretrained(
        cls,
        path: str | Path,
        dtype: str = "auto",
        context_length: int | None = None,
        quantization: str | None = None,
    ) -> "ModelConfig":
        """Reads the configuration in a checkpoint directory; no weights are touched.

        Args:
            path: The directory.
            dtype: One of ACTIVATION_DTYPES; `auto` is float16, whose significand has three more
                bits than that of bfloat16 and which the kernels multiply as fast.
            context_length: Limit below the model's own.
            quantization: One of QUANTIZATION_CHOICES, to quantize an unquantized checkpoint while
                it is loaded.

        Raises:
            CheckpointError: A file is missing or damaged, or lacks a key.
            UnsupportedConfigError: Architecture, scheme or option that is not supported.
        """
        directory = Path(path)
        with blaming("the configuration cannot be used", directory / CONFIG_FILE):
            return cls._read(directory, dtype, context_length, quantization)

    @classmethod
    def _read(
        cls, directory: Path, dtype: str, context_length: int | None, quantization: str | None
    ) -> "ModelConfig":
        config_file = directory / CONFIG_FILE
        raw = read_config(directory)
        model = get_text_model(raw, config_file)
        text = model.config
        if model.skipped_modules:
            logger.info("text only: %s are skipped", ", ".join(model.skipped_modules))
        quant_config = get_quantization_config(raw, quantization, config_file)
        generation = read_generation_config(directory)
        generation_file = directory / GENERATION_CONFIG_FILE

        required = ("hidden_size", "num_hidden_layers", "num_attention_heads", "vocab_size")
        for key in required:
            if not isinstance(text.get(key), int) or text[key] < 1:
                raise CheckpointError(
                    f"{CONFIG_FILE} lacks {key}"
                    if key not in text
                    else f"{CONFIG_FILE} has a bad {key}",
                    file=config_file,
                    expected="a positive integer",
                    found=text.get(key, "nothing"),
                )
        hf_config = load_hf_config(text, config_file)
        num_heads = hf_config.num_attention_heads
        num_kv_heads = getattr(hf_config, "num_key_value_heads", None) or num_heads
        head_dim = getattr(hf_config, "head_dim", None) or hf_config.hidden_size // num_heads
        if num_heads % num_kv_heads:
            raise UnsupportedConfigError(
                f"num_attention_heads {num_heads} is not a multiple of "
                f"num_key_value_heads {num_kv_heads}"
            )
        own_length = get_context_length(hf_config.to_dict())
        if own_length is None:
            raise CheckpointError(
                f"{CONFIG_FILE} has a bad max_position_embeddings",
                file=config_file,
                expected="a positive integer",
                found=hf_config.max_position_embeddings,
            )
        if own_length > LONGEST_CONTEXT:
            raise CheckpointError(
                f"{CONFIG_FILE} stretches the rotation to a context that is not believed",
                file=config_file,
                expected=f"at most {LONGEST_CONTEXT} tokens",
                found=own_length if own_length < 10**20 else "a number of more than 20 digits",
            )
        if context_length is not None and not 1 <= context_length <= own_length:
            raise UnsupportedConfigError(
                f"context length {context_length} is not between 1 and the model's {own_length}"
            )
        tied = bool(hf_config.tie_word_embeddings)
        tensor_parallel = TensorParallel()
        return cls(
            path=directory,
            hf_config=hf_config,
            architecture=model.architecture,
            dtype=_resolve_dtype(dtype),
            context_length=context_length or own_length,
            vocab_size=hf_config.vocab_size,
            hidden_size=hf_config.hidden_size,
            num_hidden_layers=hf_config.num_hidden_layers,
            num_attention_heads=num_heads,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            tensor_parallel=tensor_parallel,
            kv_layout=get_kv_layout(hf_config.to_dict()).on_each_rank(tensor_parallel),
            tie_word_embeddings=tied,
            eos_token_ids=read_eos_token_ids(
                [(config_file, raw), (config_file, text), (generation_file, generation)]
            ),
            quant_config=quant_config,
            unused_tensors=UnusedTensors(
                skipped_modules=model.skipped_modules,
                tied=tied,
                num_layers=hf_config.num_hidden_layers,
                num_predicting_layers=getattr(hf_config, "num_nextn_predict_layers", None) or 0,
                has_scales=quant_config is not None and quant_config.has_scales,
            ),
            quantization=quantization,
        )


def _resolve_dtype(requested: str) -> torch.dtype:
    if requested not in ACTIVATION_DTYPES:
        raise UnsupportedConfigError(
            f"dtype {requested!r} is not supported; expected one of {', '.join(ACTIVATION_DTYPES)}"
        )
    name = ACTIVATION_DTYPES[requested]
    dtype: torch.dtype = torch.float16 if name == "auto" else getattr(torch, name)
    return dtype
