"""Options that the generating commands share, and the engine they describe."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srt.checkpoint.formats.schemes import QUANTIZATION_CHOICES
from srt.configs.dtypes import ACTIVATION_DTYPES, KV_CACHE_DTYPES
from srt.errors import RequestError
from srt.utils.kernels import load_kernels
from srt.utils.text_streams import read_stdin

if TYPE_CHECKING:
    from srt.entrypoints.engine import Engine


def add_model_options(parser: argparse.ArgumentParser) -> argparse._ArgumentGroup:
    """Options of the model and how it is held; returns their group."""
    group = parser.add_argument_group("model")
    group.add_argument(
        "--model",
        "--model-path",
        required=True,
        metavar="MODEL",
        help="directory of the checkpoint, or org/name[@revision] on the Hugging Face Hub",
    )
    group.add_argument(
        "--revision",
        metavar="REV",
        help="branch, tag or commit of a model on the Hub (default: main)",
    )
    group.add_argument(
        "--dtype",
        choices=tuple(ACTIVATION_DTYPES),
        default="auto",
        metavar="DTYPE",
        help="dtype of activations: bfloat16 (bf16), float16 (half, fp16), float32 (float, fp32) "
        "or auto, which is float16 (default: %(default)s)",
    )
    group.add_argument(
        "--quantization",
        choices=tuple(QUANTIZATION_CHOICES),
        help="quantize a bf16, fp16 or f32 checkpoint to FP8 while loading it: per tensor, per "
        "channel, or per block of 128 x 128 (default: run it as it is)",
    )
    group.add_argument(
        "--packed-cache",
        metavar="DIR",
        help="keep packed weights here; the next start maps them and is faster",
    )
    group.add_argument(
        "--threads",
        type=int,
        metavar="N",
        help="threads (default: OMP_NUM_THREADS, or one a physical core that may be used)",
    )
    group.add_argument("--quiet", action="store_true", help="no progress bars and no statistics")
    return group


def add_engine_options(parser: argparse.ArgumentParser) -> None:
    """Options of the model and how it runs."""
    group = add_model_options(parser)
    group.add_argument(
        "--context-length",
        "--max-model-len",
        type=int,
        metavar="N",
        help="longest sequence (default: the model's own limit)",
    )
    group.add_argument(
        "--max-total-tokens",
        type=int,
        metavar="N",
        help="tokens that the KV cache holds (default: by --mem-fraction)",
    )
    group.add_argument(
        "--mem-fraction",
        "--mem-fraction-static",
        type=float,
        default=0.5,
        metavar="F",
        help="share of the memory that is free after loading which the KV cache may take "
        "(default: %(default)s)",
    )
    group.add_argument(
        "--kv-cache-dtype",
        choices=tuple(KV_CACHE_DTYPES),
        default="auto",
        metavar="DTYPE",
        help="dtype of keys and values in the cache: fp8_e4m3 (fp8, fp8_e4m3fn), or auto, which is "
        "that of activations (default: %(default)s)",
    )
    group.add_argument(
        "--quantize-lm-head",
        action="store_true",
        help="hold the output projection in FP8, which makes decoding faster and a little less "
        "exact",
    )
    group.add_argument(
        "--disable-radix-cache",
        action="store_true",
        help="do not keep keys and values of ended requests for those with the same prefix",
    )
    group.add_argument(
        "--chunked-prefill-size",
        type=int,
        default=512,
        metavar="N",
        help="most prompt tokens of one forward pass (default: %(default)s)",
    )
    group.add_argument(
        "--disable-graph",
        "--disable-cuda-graph",
        "--enforce-eager",
        action="store_true",
        help="run the operators of every decode pass from Python, instead of recording and "
        "replaying them",
    )
    group.add_argument(
        "--enable-torch-compile",
        action="store_true",
        help="compile decode with torch.compile at start",
    )


def make_engine(
    args: argparse.Namespace, *, max_running_requests: int, template_needed_by: str | None = None
) -> "Engine":
    """The engine that the options of `add_engine_options` describe."""
    return make_engine_of_model(
        args,
        context_length=args.context_length,
        max_running_requests=max_running_requests,
        max_total_tokens=args.max_total_tokens,
        mem_fraction=args.mem_fraction,
        kv_cache_dtype=args.kv_cache_dtype,
        quantize_lm_head=args.quantize_lm_head,
        enable_radix_cache=not args.disable_radix_cache,
        chunked_prefill_size=args.chunked_prefill_size,
        disable_graph=args.disable_graph,
        enable_torch_compile=args.enable_torch_compile,
        sampling_defaults=args.sampling_defaults,
        template_needed_by=template_needed_by,
    )


def make_engine_of_model(args: argparse.Namespace, **options: Any) -> "Engine":
    """An engine for the model that the options of `add_model_options` describe."""
    with args.signals.importing():
        load_kernels()
        from srt.entrypoints.engine import Engine

    return Engine(
        args.model,
        revision=args.revision,
        dtype=args.dtype,
        quantization=args.quantization,
        packed_cache=args.packed_cache,
        num_threads=args.threads,
        progress=not args.quiet,
        **options,
    )


def read_text(file: Path, what: str) -> str:
    """Content of a text file, or of stdin for `-`.

    Raises:
        RequestError: It cannot be read or is not UTF-8; the message calls it `what`.
    """
    if str(file) == "-":
        return read_stdin(what)
    try:
        return file.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise RequestError(f"cannot read {what}: {error}") from error
