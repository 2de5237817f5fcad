"""What each of several ranks holds: shapes of layers and of the KV cache."""

from contextlib import AbstractContextManager

import pytest
import torch

from srt.checkpoint.formats.fp8 import Fp8Config
from srt.checkpoint.kv_layout import KVLayout
from srt.errors import UnsupportedConfigError
from srt.layers.latent_projection import LatentProjection
from srt.layers.linear import (
    ColumnParallelLinear,
    LinearBase,
    MergedColumnParallelLinear,
    QKVParallelLinear,
    ReplicatedLinear,
    RowParallelLinear,
)
from srt.layers.parameter import ModelParameter
from srt.layers.vocab_parallel_embedding import ParallelLMHead, VocabParallelEmbedding
from srt.test.ci_register import register_cpu_ci
from srt.utils.tensor_parallel import TensorParallel

register_cpu_ci(est_time=2, suite="per-commit")

SIZES = [1, 2, 3, 4]
HIDDEN, HEAD_DIM, HEADS, INTERMEDIATE, VOCAB = 96, 8, 24, 120, 1200


def shape_of(layer: torch.nn.Module) -> tuple[int, ...]:
    return tuple(layer.get_parameter("weight").shape)


def shards_of(layer: LinearBase) -> dict[str, int]:
    weight = layer.get_parameter("weight")
    assert isinstance(weight, ModelParameter)
    return {name: rows.stop - rows.start for name, rows in weight.shards.items()}


@pytest.mark.parametrize("size", SIZES)
def test_columns_are_output_rows_and_rows_are_inputs(size: int) -> None:
    tp, quant = TensorParallel(size), Fp8Config()
    column = ColumnParallelLinear(HIDDEN, INTERMEDIATE, tp=tp, bias=True, quant_config=quant)
    assert shape_of(column) == (INTERMEDIATE // size, HIDDEN)
    assert column.bias is not None
    assert column.bias.shape == (INTERMEDIATE // size,)
    row = RowParallelLinear(INTERMEDIATE, HIDDEN, tp=tp, bias=True, quant_config=quant)
    assert shape_of(row) == (HIDDEN, INTERMEDIATE // size)
    assert row.bias is not None
    assert row.bias.shape == (HIDDEN,)
    assert shape_of(ReplicatedLinear(HIDDEN, INTERMEDIATE)) == (INTERMEDIATE, HIDDEN)


@pytest.mark.parametrize("size", SIZES)
def test_each_shard_of_a_merged_layer_is_shared_out(size: int) -> None:
    shards = {"gate_proj": 120, "up_proj": 48}
    layer = MergedColumnParallelLinear(HIDDEN, shards, tp=TensorParallel(size))
    assert shards_of(layer) == {name: rows // size for name, rows in shards.items()}
    assert shape_of(layer) == (168 // size, HIDDEN)


@pytest.mark.parametrize(
    ("size", "kv_heads", "held"),
    [(1, 6, 6), (2, 6, 3), (3, 6, 2), (2, 1, 1), (3, 1, 1), (4, 2, 1), (4, 4, 1)],
)
def test_ranks_hold_the_kv_heads_that_their_queries_read(
    size: int, kv_heads: int, held: int
) -> None:
    tp = TensorParallel(size)
    layer = QKVParallelLinear(HIDDEN, HEAD_DIM, HEADS, kv_heads, tp=tp, bias=True)
    assert (layer.num_heads, layer.num_kv_heads) == (HEADS // size, held)
    rows = {
        "q_proj": HEADS // size * HEAD_DIM,
        "k_proj": held * HEAD_DIM,
        "v_proj": held * HEAD_DIM,
    }
    assert shards_of(layer) == rows
    assert shape_of(layer) == (sum(rows.values()), HIDDEN)
    layout = KVLayout(2, kv_heads, HEAD_DIM, HEAD_DIM).on_each_rank(tp)
    assert layout == KVLayout(2, held, HEAD_DIM, HEAD_DIM)


@pytest.mark.parametrize("size", SIZES)
def test_latents_are_held_by_all_and_their_heads_shared_out(size: int) -> None:
    tp = TensorParallel(size)
    projection = LatentProjection(
        HIDDEN, HEADS, (HEAD_DIM, 4), tp=tp, quant_config=None, prefix="kv_b_proj"
    )
    assert projection.num_heads == HEADS // size
    assert shape_of(projection) == (HEADS // size * 12, HIDDEN)
    assert KVLayout(2, 1, 576, 0).on_each_rank(tp) == KVLayout(2, 1, 576, 0)


@pytest.mark.parametrize("size", SIZES)
def test_the_vocabulary_is_shared_out(size: int) -> None:
    tp = TensorParallel(size)
    table = VocabParallelEmbedding(VOCAB, HIDDEN, torch.bfloat16, tp=tp)
    head = ParallelLMHead(HIDDEN, VOCAB, tp=tp, quant_config=None)
    assert shape_of(table) == shape_of(head) == (VOCAB // size, HIDDEN)


def test_what_cannot_be_shared_out_is_named() -> None:
    two, three, four = (TensorParallel(size) for size in (2, 3, 4))

    def refuses(message: str) -> AbstractContextManager[object]:
        return pytest.raises(UnsupportedConfigError, match=f"^{message}$")

    with refuses("a.q_b_proj: 25 outputs cannot be shared out among 2 ranks"):
        ColumnParallelLinear(HIDDEN, 25, tp=two, prefix="a.q_b_proj")
    with refuses("a.down_proj: 200 inputs cannot be shared out among 3 ranks"):
        RowParallelLinear(200, HIDDEN, tp=three, prefix="a.down_proj")
    with refuses("a.gate_up_proj: 50 outputs of up_proj cannot be shared out among 4 ranks"):
        shards = {"gate_proj": 40, "up_proj": 50}
        MergedColumnParallelLinear(HIDDEN, shards, tp=four, prefix="a.gate_up_proj")
    with refuses("a.qkv_proj: 6 query heads cannot be shared out among 4 ranks"):
        QKVParallelLinear(HIDDEN, HEAD_DIM, 6, 3, tp=four, prefix="a.qkv_proj")
    for heads, tp in ((3, two), (2, three), (3, four)):
        with refuses(f"KV cache: {heads} KV heads cannot be shared out among {tp.size} ranks"):
            KVLayout(2, heads, HEAD_DIM, HEAD_DIM).on_each_rank(tp)
    with refuses("a.kv_b_proj: 6 heads cannot be shared out among 4 ranks"):
        LatentProjection(64, 6, (4, 4), tp=four, quant_config=None, prefix="a.kv_b_proj")
    with refuses("embed_tokens: 1007 tokens cannot be shared out among 2 ranks"):
        VocabParallelEmbedding(1007, HIDDEN, torch.bfloat16, tp=two)
