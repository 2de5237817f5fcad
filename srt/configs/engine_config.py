"""What an engine is told besides requests: each option's name, type, default, check, help and flag.

The constructor of `srt.Engine` and its documentation, the model runner and the command line are
made from this. It loads neither Torch nor NumPy, so that `srt --help` is there at once.
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from srt.checkpoint.formats.schemes import QUANTIZATION_CHOICES
from srt.configs import option
from srt.configs.dtypes import ACTIVATION_DTYPES, KV_CACHE_DTYPES
from srt.configs.option import Flag, about, documented
from srt.errors import OptionError
from srt.utils.threads import MAX_THREADS

# The cache's table has a row for each, of the context's length.
_MAX_RUNNING_REQUESTS = 65_536
_SAMPLING_DEFAULTS = ("model", "greedy")


@documented()
@dataclass(frozen=True)
class EngineConfig:
    """The options of an engine, checked as far as that can be done without the model.

    Args:
        OPTIONS

    Raises:
        OptionError: An option has a value that it cannot have, or two do not go together.
    """

    model_path: str | Path = field(
        metadata=about(
            "directory of the checkpoint, or org/name[@revision] on the Hugging Face Hub",
            option.path,
            flag=Flag(("--model", "--model-path"), "model", "MODEL"),
        )
    )
    _: KW_ONLY
    revision: str | None = field(
        default=None,
        metadata=about(
            "branch, tag or commit of a model on the Hub",
            option.text,
            unset="main",
            flag=Flag(("--revision",), "model", "REV"),
        ),
    )
    dtype: str = field(
        default="auto",
        metadata=about(
            "dtype of activations: bfloat16 (bf16), float16 (half, fp16), float32 (float, fp32) or "
            "auto, which is float16: more exact than bfloat16, whose range is larger, and as fast",
            option.one_of(tuple(ACTIVATION_DTYPES)),
            choices=tuple(ACTIVATION_DTYPES),
            flag=Flag(("--dtype",), "model", "DTYPE"),
        ),
    )
    quantization: str | None = field(
        default=None,
        metadata=about(
            "quantize a bf16, fp16 or f32 checkpoint to FP8 while loading it: per tensor (fp8), "
            "per channel, or per block of 128 x 128",
            option.one_of(tuple(QUANTIZATION_CHOICES)),
            choices=tuple(QUANTIZATION_CHOICES),
            unset="run it as it is",
            flag=Flag(("--quantization",), "model"),
        ),
    )
    packed_cache: str | Path | None = field(
        default=None,
        metadata=about(
            "keep packed weights in this directory; the next start maps them and is faster",
            option.path,
            flag=Flag(("--packed-cache",), "model", "DIR"),
        ),
    )
    num_threads: int | None = field(
        default=None,
        metadata=about(
            "threads of the process's Torch operators and the kernels",
            option.integer(MAX_THREADS),
            unset="OMP_NUM_THREADS, or one a physical core that may be used",
            flag=Flag(("--threads",), "model", "N"),
        ),
    )
    progress: bool = field(
        default=True,
        metadata=about(
            "show progress bars on stderr if that is a terminal",
            option.truth,
            flag=Flag(("--quiet",), "model", help="no progress bars and no statistics"),
        ),
    )
    context_length: int | None = field(
        default=None,
        metadata=about(
            "longest sequence, prompt and output together",
            option.integer(),
            unset="the model's own limit",
            flag=Flag(("--context-length", "--max-model-len"), "serving", "N"),
        ),
    )
    max_running_requests: int = field(
        default=32,
        metadata=about(
            "most requests decoded together; further ones wait",
            option.integer(_MAX_RUNNING_REQUESTS),
            flag=Flag(("--max-running-requests",), "server", "N"),
        ),
    )
    max_total_tokens: int | None = field(
        default=None,
        metadata=about(
            "tokens that the KV cache holds",
            option.integer(),
            unset="by {mem_fraction}",
            flag=Flag(("--max-total-tokens",), "serving", "N"),
        ),
    )
    mem_fraction: float = field(
        default=0.5,
        metadata=about(
            "share of the memory that is free after loading which the KV cache may take",
            option.share,
            flag=Flag(("--mem-fraction", "--mem-fraction-static"), "serving", "F"),
        ),
    )
    kv_cache_dtype: str = field(
        default="auto",
        metadata=about(
            "dtype of keys and values in the cache: fp8_e4m3 (fp8, fp8_e4m3fn), which halves it "
            "and takes scales from the checkpoint where it has them, or auto, which is that of "
            "activations",
            option.one_of(tuple(KV_CACHE_DTYPES)),
            choices=tuple(KV_CACHE_DTYPES),
            flag=Flag(("--kv-cache-dtype",), "serving", "DTYPE"),
        ),
    )
    quantize_lm_head: bool = field(
        default=False,
        metadata=about(
            "hold the output projection in FP8, a scale a token of the vocabulary, where the "
            "checkpoint has it in 16 bits, which makes decoding faster and a little less exact",
            option.truth,
            flag=Flag(("--quantize-lm-head",), "serving"),
        ),
    )
    enable_radix_cache: bool = field(
        default=True,
        metadata=about(
            "keep keys and values of ended requests for those with the same prefix",
            option.truth,
            flag=Flag(("--disable-radix-cache",), "serving"),
        ),
    )
    chunked_prefill_size: int = field(
        default=512,
        metadata=about(
            "most prompt tokens of one forward pass; longer prompts take several",
            option.integer(),
            flag=Flag(("--chunked-prefill-size",), "serving", "N"),
        ),
    )
    disable_graph: bool = field(
        default=False,
        metadata=about(
            "run the operators of every decode pass from Python, instead of recording and "
            "replaying them",
            option.truth,
            flag=Flag(("--disable-graph", "--disable-cuda-graph", "--enforce-eager"), "serving"),
        ),
    )
    enable_torch_compile: bool = field(
        default=False,
        metadata=about(
            "compile decode with torch.compile at start, which takes from seconds to minutes",
            option.truth,
            flag=Flag(("--enable-torch-compile",), "serving"),
        ),
    )
    compiled_batch_sizes: Sequence[int] | None = field(
        default=None,
        metadata=about(
            "batch sizes to compile, with {enable_torch_compile}",
            option.integers(_MAX_RUNNING_REQUESTS),
            unset="powers of two up to {max_running_requests}",
        ),
    )
    sampling_defaults: str = field(
        default="model",
        metadata=about(
            "what stands in for sampling parameters that a request leaves open; model: what the "
            "checkpoint's generation_config.json says, greedy where it says nothing; greedy: the "
            "most likely token",
            option.one_of(_SAMPLING_DEFAULTS),
            choices=_SAMPLING_DEFAULTS,
            flag=Flag(("--sampling-defaults",), "sampling"),
        ),
    )
    template_needed_by: str | None = field(
        default=None,
        metadata=about(
            "what the caller needs a chat template for, in words; a checkpoint without one is "
            "refused then, before its weights are read",
            option.text,
        ),
    )

    def __post_init__(self) -> None:
        option.check_options(self)
        if self.compiled_batch_sizes is not None and not self.enable_torch_compile:
            raise OptionError(
                "compiled_batch_sizes", "enable_torch_compile with it", self.compiled_batch_sizes
            )
