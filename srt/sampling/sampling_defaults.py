"""What stands in for sampling parameters that a request leaves open."""

from pathlib import Path

from srt.checkpoint.generation_config import GENERATION_CONFIG_FILE, read_sampling_values
from srt.errors import CheckpointError, RequestError
from srt.sampling.sampling_params import DISTRIBUTION_NAMES, DistributionParams

SAMPLING_DEFAULTS = ("model", "greedy")


def get_sampling_defaults(directory: Path, source: str) -> DistributionParams:
    """What stands in for sampling parameters that a request leaves open.

    Args:
        directory: The checkpoint's.
        source: `model` for what generation_config.json says (see :func:`read_sampling_values`), or
            `greedy`.

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
    values = read_sampling_values(directory, DISTRIBUTION_NAMES)
    try:
        return DistributionParams(**values)
    except RequestError as error:
        raise CheckpointError(
            f"{GENERATION_CONFIG_FILE} has a bad {str(error).removeprefix('sampling parameter ')}",
            file=directory / GENERATION_CONFIG_FILE,
        ) from error
