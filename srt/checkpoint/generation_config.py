"""What a checkpoint says about generating: which tokens end an answer, and how to sample."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from srt.checkpoint.files import lies_there, read_json
from srt.errors import CheckpointError

GENERATION_CONFIG_FILE = "generation_config.json"


def read_generation_config(directory: Path) -> Mapping[str, Any]:
    """The content of generation_config.json; empty where there is none.

    Raises:
        CheckpointError: It cannot be read.
    """
    file = directory / GENERATION_CONFIG_FILE
    return read_json(file) if lies_there(file) else {}


def read_eos_token_ids(configs: Iterable[tuple[Path, Mapping[str, Any]]]) -> frozenset[int]:
    """The end-of-sequence tokens that any of these files' contents names.

    Raises:
        CheckpointError: `eos_token_id` is neither an integer nor a list of them.
    """
    found: set[int] = set()
    for file, config in configs:
        value = config.get("eos_token_id")
        ids = [] if value is None else value if isinstance(value, list) else [value]
        if not all(isinstance(i, int) and not isinstance(i, bool) for i in ids):
            raise CheckpointError(
                "eos_token_id is neither an integer nor a list of integers", file=file, found=value
            )
        found.update(ids)
    return frozenset(found)


def read_sampling_values(directory: Path, names: Iterable[str]) -> dict[str, Any]:
    """What generation_config.json says of the sampling parameters `names`, unchecked; those that it
    leaves open are absent, but for `temperature`, which is 0 for greedy.

    As transformers reads the file, `do_sample: false` is greedy, and so is one that says nothing
    about sampling. As SGLang and vLLM read it, any of the other keys without `do_sample` means
    sampling, and what is not said is 1 or off. The repetition penalty holds in both cases.

    Raises:
        CheckpointError: The file cannot be read.
    """
    generation = read_generation_config(directory)
    values = {name: generation[name] for name in names if generation.get(name) is not None}
    do_sample = generation.get("do_sample")
    if not isinstance(do_sample, bool):
        do_sample = bool(values.keys() - {"repetition_penalty"})
    if do_sample:
        values.setdefault("temperature", 1.0)
    else:
        values["temperature"] = 0.0
    return values
