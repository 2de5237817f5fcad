"""What a checkpoint says about generating: which tokens end an answer, and how to sample."""

from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from srt.checkpoint.files import lies_there, read_json
from srt.errors import CheckpointError, RequestError
from srt.sampling.sampling_params import DISTRIBUTION_NAMES, DistributionParams

GENERATION_CONFIG_FILE = "generation_config.json"
SAMPLING_DEFAULTS = ("model", "greedy")


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


def get_sampling_defaults(directory: Path, source: str) -> DistributionParams:
    """What stands in for sampling parameters that a request leaves open.

    As transformers reads generation_config.json, `do_sample: false` is greedy, and so is a file
    that says nothing about sampling. As SGLang and vLLM read it, any of the other keys without
    `do_sample` means sampling, and what is not said is 1 or off. The repetition penalty holds in
    both cases.

    Args:
        directory: The checkpoint's.
        source: `model` for what generation_config.json says, or `greedy`.

    Raises:
        RequestError: Another `source`.
        CheckpointError: A value out of range.
    """
    if source not in SAMPLING_DEFAULTS:
        raise RequestError(
            f"sampling_defaults: expected {' or '.join(SAMPLING_DEFAULTS)}, found {source!r}"
        )
    if source == "greedy":
        return DistributionParams()
    file, generation = directory / GENERATION_CONFIG_FILE, read_generation_config(directory)
    values = {
        name: generation[name] for name in DISTRIBUTION_NAMES if generation.get(name) is not None
    }
    do_sample = generation.get("do_sample")
    if not isinstance(do_sample, bool):
        do_sample = bool(values.keys() - {"repetition_penalty"})
    if do_sample:
        values.setdefault("temperature", 1.0)
    else:
        values["temperature"] = 0.0
    try:
        return DistributionParams(**values)
    except RequestError as error:
        raise CheckpointError(
            f"{GENERATION_CONFIG_FILE} has a bad {str(error).removeprefix('sampling parameter ')}",
            file=file,
        ) from error
