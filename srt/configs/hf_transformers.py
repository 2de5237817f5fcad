"""The one door to transformers: whatever of it is made from a checkpoint is made here.

Nothing that comes with a checkpoint is executed and nobody is asked whether it may be. A class that
the checkpoint brings is never loaded; where transformers has one of its own that fits, that one
is, with a line in the log that says which file wanted what, and elsewhere that line is the error.
Nothing is downloaded, and weights are read from safetensors only.

A test looks for `from_pretrained` and its like elsewhere in the tree.
"""

from __future__ import annotations

import json
import logging
import tempfile
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from srt.checkpoint.config_files import CONFIG_FILE, read_config
from srt.checkpoint.files import blaming, explain, lies_there, read_json
from srt.checkpoint.tokenizer_files import (
    TEKKEN_FILE,
    TOKENIZER_CONFIG_FILE,
    TOKENIZER_FILE,
    has_tokenizer,
    read_chat_template,
    requested_code,
    stage_tokenizer,
)
from srt.errors import CheckpointError, SrtError

logger = logging.getLogger(__name__)

# Keys of a configuration that no text model here computes with: code, and the labels of
# classifiers, of which transformers builds as many as `num_labels` says.
_UNUSED_KEYS = ("auto_map", "id2label", "label2id", "num_labels", "problem_type")
# Times that normalizing or decoding may make a text longer; real tokenizers write one character for
# a space.
_MAX_GROWTH = 10_000.0
_GROWING = {"ByteLevel": 2.0, "BertNormalizer": 3.0}
# All of Mistral's own tokenizers begin with these tokens.
_TEKKEN_BOS, _TEKKEN_EOS = "<s>", "</s>"


def load_hf_config(config: Mapping[str, Any], file: Path) -> Any:
    """transformers' configuration object of `config`, the content of `file` or a part of it.

    Raises:
        CheckpointError: transformers does not know its `model_type`, or refuses a value.
    """
    from transformers import CONFIG_MAPPING  # loads slowly

    wanted = requested_code(config, file)
    if wanted is not None:
        logger.warning("%s, which is not run", wanted)
    model_type = config.get("model_type")
    if not isinstance(model_type, str) or model_type not in CONFIG_MAPPING:
        raise CheckpointError(
            f"transformers has no model_type {model_type!r}"
            + (f", and {wanted}, which is never done" if wanted else ""),
            file=file,
        )
    with blaming("transformers cannot read the configuration", file):
        return CONFIG_MAPPING[model_type].from_dict(
            {key: value for key, value in config.items() if key not in _UNUSED_KEYS}
        )


def load_tokenizer(directory: Path) -> Any | None:
    """The tokenizer in a checkpoint directory, or None if it has none (then only token ids can be
    given).

    Where Mistral's tekken.json is the only one and transformers cannot convert it, a warning says
    so.

    Raises:
        CheckpointError: It has one that cannot be read, or only one that is the checkpoint's code.
    """
    only_tekken = not has_tokenizer(directory) and lies_there(directory / TEKKEN_FILE)
    if not only_tekken and not has_tokenizer(directory):
        return None
    try:
        with tempfile.TemporaryDirectory(prefix="srt-tokenizer-") as name:
            staged = Path(name)
            settings = stage_tokenizer(directory, staged)
            if only_tekken:
                tokenizer = _load_tekken(directory, staged)
            else:
                tokenizer = _load_staged(directory, staged, settings)
    except OSError as error:
        raise SrtError(f"cannot use the directory for temporary files: {error}") from error
    if tokenizer is not None:
        tokenizer.name_or_path = str(directory)
        tokenizer.chat_template = read_chat_template(directory)
    return tokenizer


def _load_staged(directory: Path, staged: Path, settings: Mapping[str, Any]) -> Any:
    from transformers import AutoTokenizer  # loads slowly

    file = directory / TOKENIZER_CONFIG_FILE
    wanted = requested_code(read_json(file), file) if lies_there(file) else None
    class_name = settings.get("tokenizer_class")
    has_fast_file = lies_there(directory / TOKENIZER_FILE)
    if class_name is not None and not _is_tokenizer_class(class_name):
        if not has_fast_file:
            raise CheckpointError(
                f"tokenizer_class {class_name!r} is none of transformers'"
                + (f", and {wanted}, which is never done" if wanted else ""),
                file=file,
                expected=f"a {TOKENIZER_FILE}, or a class that transformers can load here",
            )
        # What transformers takes for a class that it does not know; it would look the name up
        # among everything that it has.
        _rewrite_class(staged, settings, "PreTrainedTokenizerFast")
    if wanted is not None:
        logger.warning(
            "%s, which is not run; the tokenizer is %s",
            wanted,
            f"that of {TOKENIZER_FILE}" if has_fast_file else class_name or "transformers' own",
        )
    with blaming("the tokenizer cannot be read", directory):
        tokenizer = AutoTokenizer.from_pretrained(
            staged, trust_remote_code=False, local_files_only=True
        )
        # A class of transformers may be had that is none for text.
        if not callable(getattr(tokenizer, "encode", None)):
            raise TypeError(f"{type(tokenizer).__name__} is no tokenizer")
        _check_growth(tokenizer)
        tokenizer.encode("")
        # Special tokens of a wrong type or that are missing fail when they are looked up.
        tokenizer.convert_ids_to_tokens(tokenizer.all_special_ids)
    return tokenizer


def _check_growth(tokenizer: Any) -> None:
    """Raises ValueError where steps of the normalizer or decoder, each of which may replace a text
    by a longer one, multiply: forty doublings of a character are a terabyte.
    """
    backend = getattr(tokenizer, "backend_tokenizer", None)
    for name in ("normalizer", "decoder"):
        part = getattr(backend, name, None)
        if part is None:
            continue
        growth = 1.0
        for step in _steps(json.loads(part.__getstate__())):
            added = step.get("content") or step.get("prepend") or ""
            pattern = step.get("pattern")
            replaced = pattern.get("String") if isinstance(pattern, dict) else None
            grows = len(added) / max(1, len(replaced or ""))
            growth *= max(_GROWING.get(step.get("type", ""), 1.0), grows)
        if growth > _MAX_GROWTH:
            raise ValueError(f"its {name} makes a text {growth:.0e} times as long")


def _steps(part: Any) -> list[dict[str, Any]]:
    """The steps of a normalizer or decoder, those of sequences one after another."""
    inner = part.get("normalizers", part.get("decoders"))
    return [part] if inner is None else [step for p in inner for step in _steps(p)]


def _rewrite_class(staged: Path, settings: Mapping[str, Any], name: str) -> None:
    content = json.dumps({**settings, "tokenizer_class": name})
    (staged / TOKENIZER_CONFIG_FILE).write_text(content)


def _is_tokenizer_class(name: str) -> bool:
    """Whether transformers has a tokenizer of this name that can be loaded here. It takes any name
    of its own, also those of models, which load weights and the checkpoint's code.
    """
    from transformers import PreTrainedTokenizerBase
    from transformers.models.auto.tokenization_auto import tokenizer_class_from_name

    if not name.isidentifier():
        return False
    try:
        found = tokenizer_class_from_name(name)
    except Exception:  # noqa: BLE001  its module needs a package that is not here, or fails
        return False
    return isinstance(found, type) and issubclass(found, PreTrainedTokenizerBase)


def _load_tekken(directory: Path, staged: Path) -> Any | None:
    from tokenizers.processors import TemplateProcessing
    from transformers import PreTrainedTokenizerFast

    try:
        with blaming("the tokenizer cannot be read", directory / TEKKEN_FILE):
            tokenizer = PreTrainedTokenizerFast.from_pretrained(
                staged,
                trust_remote_code=False,
                local_files_only=True,
                bos_token=_TEKKEN_BOS,
                eos_token=_TEKKEN_EOS,
            )
    except CheckpointError as error:
        logger.warning(
            "%s cannot be read by this version of transformers, so that only token ids can be "
            "given: %s",
            directory / TEKKEN_FILE,
            explain(error.__cause__ or error),
        )
        return None
    # The file does not say that a prompt begins with a token of its own.
    tokenizer.backend_tokenizer.post_processor = TemplateProcessing(
        single=f"{_TEKKEN_BOS} $A", special_tokens=[(_TEKKEN_BOS, tokenizer.bos_token_id)]
    )
    return tokenizer


def load_hf_model(directory: Path, dtype: Any) -> Any:
    """transformers' own model over an unquantized checkpoint, for comparisons.

    Args:
        directory: The checkpoint.
        dtype: A torch.dtype.

    Raises:
        CheckpointError: transformers has no such model, or cannot load it.
    """
    from transformers import AutoModelForCausalLM

    file = directory / CONFIG_FILE
    config = load_hf_config(read_config(directory), file)
    with blaming("transformers cannot load the model", directory):
        return AutoModelForCausalLM.from_pretrained(
            directory,
            config=config,
            dtype=dtype,
            trust_remote_code=False,
            local_files_only=True,
            use_safetensors=True,
        ).eval()
