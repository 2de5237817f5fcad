"""Shapes that are timed: the linear layers of models in use, and MLA's batched products."""

from dataclasses import dataclass


@dataclass(frozen=True)
class Shape:
    """One weight: [n, k], or [batch, n, k] for a batched product."""

    label: str
    n: int
    k: int
    batch: int = 0

    def __str__(self) -> str:
        size = f"N={self.n} K={self.k}"
        return f"{self.label}: {f'B={self.batch} ' if self.batch else ''}{size}"


def _layers(model: str, qkv: tuple[int, int], o: tuple[int, int], ffn: int) -> list[Shape]:
    hidden = qkv[1]
    return [
        Shape(f"{model} qkv", *qkv),
        Shape(f"{model} o", *o),
        Shape(f"{model} gate_up", 2 * ffn, hidden),
        Shape(f"{model} down", hidden, ffn),
    ]


SHAPES: dict[str, list[Shape]] = {
    "square": [Shape("square", 4096, 4096)],
    "smollm2-135m": _layers("SmolLM2-135M", (960, 576), (576, 576), 1536),
    "llama-3.2-1b": _layers("Llama-3.2-1B", (3072, 2048), (2048, 2048), 8192),
    "llama-3.1-8b": _layers("Llama-3.1-8B", (6144, 4096), (4096, 4096), 14336),
    "ministral-3-14b": _layers("Ministral-3-14B", (6144, 5120), (5120, 4096), 16384),
    # DeepSeek-V3, all 128 heads: the absorbed up-projections of keys and of values.
    "mla": [
        Shape("DeepSeek-V3 MLA w_kc", 512, 128, batch=128),
        Shape("DeepSeek-V3 MLA w_vc", 128, 512, batch=128),
    ],
}
SMALL_SHAPES = [Shape("small", n, 576) for n in (192, 576, 1536)]
ROWS = (1, 2, 4, 8, 16, 32, 64, 128, 256, 512, 1024)


@dataclass(frozen=True)
class Preset:
    """How much is timed."""

    shapes: str
    rows: tuple[int, ...]
    rounds: int
    seconds: float  # a method is timed no further, once it has taken this long at one shape


PRESETS = {
    "quick": Preset("square", (1, 4, 16, 256), 9, 0.3),
    "full": Preset(",".join(SHAPES), ROWS, 15, 2.0),
}
