"""What stands in for sampling parameters that a request leaves open."""

from pathlib import Path

from srt.checkpoint.generation_config import GENERATION_CONFIG_FILE, read_sampling_values
from srt.errors import CheckpointError, RequestError
from srt.sampling.sampling_params import DISTRIBUTION_NAMES, DistributionParams


def get_sampling_defaults(directory: Path) -> DistributionParams:
    """What a checkpoint's generation_config.json says (see :func:`read_sampling_values`).

    Raises:
        CheckpointError: A value out of range.
    """
    values = read_sampling_values(directory, DISTRIBUTION_NAMES)
    try:
        return DistributionParams(**values)
    except RequestError as error:
        raise CheckpointError(
            f"{GENERATION_CONFIG_FILE} has a bad {str(error).removeprefix('sampling parameter ')}",
            file=directory / GENERATION_CONFIG_FILE,
        ) from error
