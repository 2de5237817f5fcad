"""Scales of an 8-bit KV cache, from the checkpoint where it has them."""

import logging
import math
from pathlib import Path

from srt.checkpoint.kv_scales import find_kv_scales
from srt.errors import CheckpointError
from srt.model_loader.mapped_checkpoint import MappedCheckpoint

logger = logging.getLogger(__name__)


def read_kv_scales(directory: Path, num_layers: int) -> list[tuple[float, float]]:
    """(key scale, value scale) of each layer: what is held times its scale is the key or the value.
    Layers without scales have 1, which suits keys and values of up to 448.

    Args:
        directory: The checkpoint.
        num_layers: Decoder layers.

    Raises:
        CheckpointError: A scale is not a single positive, finite number.
    """
    scales = [(1.0, 1.0)] * num_layers
    with MappedCheckpoint.open(directory) as checkpoint:
        found = find_kv_scales(checkpoint)
        for layer, metas in found.items():
            values = []
            for meta in (metas.k, metas.v):
                if meta is None:
                    values.append(1.0)
                    continue
                tensor = checkpoint.get(meta.name)
                value = float(tensor) if tensor.numel() == 1 else math.nan
                if not 0 < value < math.inf:
                    raise CheckpointError(
                        "a scale of the KV cache is not usable",
                        file=meta.file,
                        tensor=meta.name,
                        expected="one positive, finite number",
                        found=value if tensor.numel() == 1 else list(tensor.shape),
                    )
                values.append(value)
            if layer < num_layers:
                scales[layer] = (values[0], values[1])
    logger.info(
        "FP8 KV cache: the checkpoint has scales for %d of %d layers", len(found), num_layers
    )
    return scales
