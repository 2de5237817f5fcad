"""A tiny FP8 Llama with a tokenizer of single bytes: what a command or an engine can be given."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

TEXT_CONFIG = TINY_CONFIG | {"vocab_size": VOCAB_SIZE}
FP8 = {"quant_method": "fp8", "activation_scheme": "dynamic"}


def write_text_model(
    directory: Path, config: Mapping[str, Any] = TEXT_CONFIG, *, chat_template: bool = True
) -> Path:
    """Writes the checkpoint, its linear layers with one scale each; returns the directory."""
    write_checkpoint(directory, dict(config), quantize(make_tensors(dict(config))), FP8)
    write_tokenizer(directory, chat_template=chat_template)
    return directory
