"""Account of the kernels' inner loops, for processors that are not at hand.

    make -C sgl-kernel-cpu account          # the table; needs llvm-mca (Debian: llvm-19 or later)
    make -C sgl-kernel-cpu account-check    # only counts instructions, against the bounds below

One row (M=1) reads each weight once: the account says how many weights, that is bytes, a core can
decode and multiply in a cycle. 96 rows share a decoded panel: the account says in which share of
the cycles the multiply unit works. Cycles are llvm-mca's for each block of instructions, times how
often it runs; what overlaps between blocks is left out, and every load hits the first cache.
"""

import argparse
import platform
import re
import shutil
import subprocess
import sys
from dataclasses import dataclass
from pathlib import Path

from traces import Instruction, NotHereError, Steady, Tracer, disassemble

_HERE = Path(__file__).resolve().parent.parent
_ITERATIONS = 100


@dataclass(frozen=True)
class Processor:
    """Whose scheduling model is used; what a core gets of the memory when all are busy."""

    mcpu: str
    ghz: float
    core_gbytes_per_s: float
    machine: str


_SAPPHIRE_RAPIDS = Processor("sapphirerapids", 3.0, 5.5, "Xeon 8480+: 307 GB/s, 56 cores")
_ZEN_4 = Processor("znver4", 3.7, 4.8, "EPYC 9654: 461 GB/s, 96 cores")
_NEOVERSE_V2 = Processor("neoverse-v2", 3.1, 7.0, "Grace: 500 GB/s, 72 cores")
_SKYLAKE_SERVER = Processor("skylake-avx512", 2.4, 6.4, "Xeon 6148: 128 GB/s, 20 cores")
_SKYLAKE = Processor("skylake", 4.0, 9.6, "Core i7-6700: 38 GB/s, 4 cores")
_HASWELL = Processor("haswell", 3.5, 6.4, "Core i7-4770: 26 GB/s, 4 cores")


@dataclass(frozen=True)
class Tier:
    """A tier, the processors it is for, and the most instructions that its loops may take.

    ``decode``: for 32 weights at M=1. ``panel``: for 1000 multiply-adds of
    ``panel_rows`` rows and 32 columns, which is more than many rows and columns take.
    """

    name: str
    processors: tuple[Processor, ...]
    decode: float
    panel: float
    qemu_cpu: str | None = None
    panel_rows: int = 12  # a multiple of the tile's height


TIERS = (
    Tier("amx", (_SAPPHIRE_RAPIDS,), 15.5, 15.5, panel_rows=32),
    Tier("avx512_bf16", (_ZEN_4, _SAPPHIRE_RAPIDS), 16.0, 105.0),
    Tier("avx512", (_SKYLAKE_SERVER, _SAPPHIRE_RAPIDS, _ZEN_4), 17.0, 180.0),
    Tier("avx2", (_SKYLAKE, _HASWELL, _ZEN_4), 28.0, 375.0),
    Tier("neon_bf16", (_NEOVERSE_V2,), 39.0, 385.0, "max"),
    Tier("neon", (_NEOVERSE_V2,), 50.0, 630.0, "cortex-a72"),
)

# Published throughputs of tile instructions (Intel, Optimization Reference Manual, chapter on AMX):
# cycles between two of a kind. The scheduling model has none.
_TILE_CYCLES = {"tdpbf16ps": 16.0, "tileloadd": 8.0, "tilestored": 16.0}


def _tile_cycles(block: list[Instruction]) -> float:
    """Cycles of the tile instructions: multiplying, loading and storing go on side by side."""
    return max(
        cycles * sum(i.mnemonic == mnemonic for i in block)
        for mnemonic, cycles in _TILE_CYCLES.items()
    )


def _cycles(
    blocks: list[list[Instruction]], mcpu: str, mca: str, arm: bool
) -> list[tuple[float, float]]:
    """Cycles of one iteration of each block as a loop, and its reciprocal throughput."""
    lines = []
    for index, block in enumerate(blocks):
        lines.append(f"# LLVM-MCA-BEGIN {index}")
        # A compare and its branch are one operation.
        lines += [
            f"{i.mnemonic} {i.operands}"
            for i in block
            if not i.is_branch and i.mnemonic not in _TILE_CYCLES
        ] or ["nop"]
        lines.append(f"# LLVM-MCA-END {index}")
    target = ["-march=aarch64", "-mtriple=aarch64-linux-gnu"] if arm else []
    done = subprocess.run(
        [
            mca,
            *target,
            f"-mcpu={mcpu}",
            f"-iterations={_ITERATIONS}",
            "-instruction-info=0",
            "-resource-pressure=0",
        ],
        input="\n".join(lines) + "\n",
        capture_output=True,
        text=True,
        check=False,
    )
    if done.returncode != 0:
        raise RuntimeError(f"{mca} -mcpu={mcpu}: {done.stderr.strip()[:2000]}")
    totals = [int(n) / _ITERATIONS for n in re.findall(r"Total Cycles:\s+(\d+)", done.stdout)]
    least = [float(n) for n in re.findall(r"Block RThroughput:\s+([\d.]+)", done.stdout)]
    tiles = [_tile_cycles(block) for block in blocks]
    return [
        (max(total, tile), max(rate if tile == 0 else 0, tile))
        for total, rate, tile in zip(totals, least, tiles, strict=True)
    ]


@dataclass(frozen=True)
class Account:
    """Cycles of a steady state: all of them, and what the multiplies alone would take."""

    cycles: float
    multiply_cycles: float


def account(steady: Steady, processor: Processor, mca: str, arm: bool) -> Account:
    """Block-wise simulation of what matters: blocks that are at least 0.2% of the instructions."""
    hot = [
        (count, block)
        for count, block in steady.blocks()
        if count * len(block) > steady.instructions / 500 and not all(i.is_branch for i in block)
    ]
    simulated = _cycles([block for _, block in hot], processor.mcpu, mca, arm)
    cycles = sum(count * total for (count, _), (total, _) in zip(hot, simulated, strict=True))
    multiplies = [(c, [i for i in b if i.is_multiply]) for c, b in hot]
    multiplies = [(c, b) for c, b in multiplies if b]
    alone = _cycles([block for _, block in multiplies], processor.mcpu, mca, arm)
    least = sum(count * rate for (count, _), (_, rate) in zip(multiplies, alone, strict=True))
    return Account(cycles, least)


def _print_decode(steady: Steady, tier: Tier, mca: str) -> None:
    per = steady.weights / 32
    mix = ", ".join(
        f"{steady.number(kind) / per:.2f} {kind}"
        for kind in ("load", "multiply", "prefetch", "branch")
    )
    print(f"{tier.name}, M=1: {steady.instructions / per:.1f} instructions for 32 weights ({mix})")
    for processor in tier.processors:
        found = account(steady, processor, mca, tier.qemu_cpu is not None)
        rate = steady.weights / found.cycles
        speed = rate * processor.ghz
        print(
            f"  {processor.mcpu:<15} {32 / rate:6.2f} cycles for 32 weights, "
            f"{rate:5.2f} bytes a cycle, {speed:5.1f} GB/s at {processor.ghz} GHz: "
            f"{speed / processor.core_gbytes_per_s:4.1f}x a core's share ({processor.machine})"
        )


def _print_panel(steady: Steady, tier: Tier, mca: str) -> None:
    products = steady.weights * steady.rows
    print(
        f"{tier.name}, M={steady.rows}: {1000 * steady.instructions / products:.2f} instructions "
        f"for 1000 multiply-adds ({1000 * steady.number('load') / products:.2f} load, "
        f"{1000 * steady.number('multiply') / products:.2f} multiply)"
    )
    for processor in tier.processors:
        found = account(steady, processor, mca, tier.qemu_cpu is not None)
        flops = 2 * products / found.cycles
        print(
            f"  {processor.mcpu:<15} {flops:7.1f} FLOP a cycle, multiply unit busy "
            f"{found.multiply_cycles / found.cycles:4.0%}"
        )


def _check(steady: Steady, tier: Tier) -> bool:
    """Print the count next to its bound; whether it holds."""
    if steady.rows == 1:
        got, bound, what = 32 * steady.instructions / steady.weights, tier.decode, "for 32 weights"
    else:
        got, bound, what = (
            1000 * steady.instructions / steady.weights / steady.rows,
            tier.panel,
            "for 1000 multiply-adds",
        )
    products = sum(
        n * steady.code[pc].products
        for pc, n in steady.counts.items()
        if steady.code[pc].is_multiply
    )
    # Fewer would mean that the trace or the list of multiply instructions is wrong.
    complete = products >= steady.weights * steady.rows
    print(
        f"{tier.name}, M={steady.rows}: {got:.2f} instructions {what}, at most {bound}"
        + ("" if got <= bound else "  TOO MANY")
        + ("" if complete else "  MULTIPLIES MISSING")
    )
    return got <= bound and complete


def main() -> int:
    """Command line; 1 when a bound is broken."""
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawTextHelpFormatter
    )
    parser.add_argument("--trace", type=Path, help="sgl_kernel_trace; default: where make puts it")
    parser.add_argument("--tiers", help="with commas; default: all")
    parser.add_argument(
        "--check", action="store_true", help="only count instructions, against the bounds"
    )
    parser.add_argument("--llvm-mca", help="default: the newest installed")
    args = parser.parse_args()
    mca: str | None = args.llvm_mca or next(
        (
            name
            for name in (*(f"llvm-mca-{v}" for v in range(30, 16, -1)), "llvm-mca")
            if shutil.which(name)
        ),
        None,
    )
    if mca is None:
        if not args.check:
            print("error: llvm-mca is not installed (Debian: llvm-19)", file=sys.stderr)
            return 2
        mca = ""  # counting needs none
    wanted = args.tiers.split(",") if args.tiers else [tier.name for tier in TIERS]
    good = True
    for tier in TIERS:
        if tier.name not in wanted:
            continue
        arm = tier.qemu_cpu is not None
        folder = "arm64" if arm else "kernels"
        binary = args.trace or _HERE / "build" / folder / "tests/sgl_kernel_trace"
        objdump = "objdump"
        if arm and platform.machine() != "aarch64":
            objdump = "aarch64-linux-gnu-objdump"
        qemu = ["qemu-aarch64", "-cpu", tier.qemu_cpu] if tier.qemu_cpu else None
        try:
            if not binary.exists():
                raise NotHereError(f"{binary} is not built")
            code = disassemble(binary, objdump)
            tracer = Tracer(binary, tier.name, qemu, code)
            one = tracer.steady_state(1, 32, 256)
            if args.check:
                good &= _check(one, tier)
                good &= _check(tracer.steady_state(tier.panel_rows, 32, 64), tier)
            else:
                _print_decode(one, tier, mca)
                # A block of rows as the kernels cut them; what is made of it serves 512 columns.
                _print_panel(tracer.wide_steady_state(96, 32, 256, 16), tier, mca)
        except NotHereError as reason:
            print(f"{tier.name}: SKIPPED: {reason}")
    return 0 if good else 1


if __name__ == "__main__":
    sys.exit(main())
