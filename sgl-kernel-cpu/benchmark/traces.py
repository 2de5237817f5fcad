"""Traces of the kernels: every instruction of a GEMM, and what it is.

``sgl_kernel_trace`` (tests/trace_main.cpp) steps through a kernel on x86-64; for AArch64 qemu logs
it. Two traces that differ in K only are subtracted: what is left is the steady state of the inner
loops, whatever their shape.
"""

import array
import os
import re
import subprocess
import tempfile
from collections import Counter
from dataclasses import dataclass
from pathlib import Path

_BEGIN, _END = "trace_begin", "trace_end"


class NotHereError(Exception):
    """This machine lacks a tier or a tool; the message says which."""


@dataclass(frozen=True)
class Instruction:
    """One line of the disassembly."""

    mnemonic: str
    operands: str

    @property
    def is_branch(self) -> bool:
        return bool(re.match(r"j[a-z]+$|call|ret|b(\.|$)|bl$|cbn?z|tbn?z", self.mnemonic))

    @property
    def is_prefetch(self) -> bool:
        return self.mnemonic.startswith(("prefetch", "prfm"))

    @property
    def is_load(self) -> bool:
        """Reads memory: on x86 the operand in parentheses is a source (AT&T: not the last)."""
        if self.is_prefetch or self.is_branch or self.mnemonic.startswith(("lea", "nop")):
            return False
        if self.mnemonic.startswith(("ld", "tileload")):
            return True
        return bool(re.search(r"\([^)]*\)\S*,", self.operands))

    @property
    def is_multiply(self) -> bool:
        """The products that a GEMM consists of."""
        pattern = r"vfn?m(add|sub)\w*ps$|vdpbf16ps|tdpbf16ps|fmla$|bfdot|bfmmla"
        return bool(re.match(pattern, self.mnemonic))

    @property
    def products(self) -> int:
        """Multiply-adds that it does."""
        if self.mnemonic == "tdpbf16ps":
            return 16 * 16 * 32
        lanes = 4
        if "%ymm" in self.operands:
            lanes = 8
        if "%zmm" in self.operands:
            lanes = 16
        return lanes * {"bfmmla": 4, "vdpbf16ps": 2, "bfdot": 2}.get(self.mnemonic, 1)


@dataclass(frozen=True)
class Steady:
    """How often each instruction ran for ``weights`` more weights and ``rows`` rows."""

    counts: dict[int, int]
    code: dict[int, Instruction]
    weights: int
    rows: int

    def number(self, kind: str) -> int:
        """How many instructions of a kind ran: ``load``, ``multiply``, ``prefetch``, ``branch``."""
        name = f"is_{kind}"
        return sum(n for pc, n in self.counts.items() if getattr(self.code[pc], name))

    @property
    def instructions(self) -> int:
        return sum(self.counts.values())

    def blocks(self) -> list[tuple[int, list[Instruction]]]:
        """Runs of neighbouring instructions that ran equally often, and how often."""
        following = dict(zip(self.code, list(self.code)[1:], strict=False))
        found: list[tuple[int, list[Instruction]]] = []
        previous, count = -1, -1
        for pc in sorted(self.counts):
            if following.get(previous) != pc or self.counts[pc] != count:
                found.append((self.counts[pc], []))
            found[-1][1].append(self.code[pc])
            previous, count = pc, self.counts[pc]
        return found


def disassemble(binary: Path, objdump: str) -> dict[int, Instruction]:
    """Address to instruction, in order."""
    try:
        listing = subprocess.run(
            [objdump, "-d", "--no-show-raw-insn", str(binary)],
            capture_output=True,
            text=True,
            check=True,
        ).stdout
    except FileNotFoundError:
        raise NotHereError(f"{objdump} is not installed") from None
    code = {}
    for line in listing.splitlines():
        if match := re.match(r"\s*([0-9a-f]+):\t(\S+)\s*(.*)", line):
            operands = re.sub(r"\s*(# |//|<).*", "", match[3])
            if match[2] == "adrp":  # an address without a mark is no operand for an assembler
                operands = operands.split(",")[0] + ", 0"
            code[int(match[1], 16)] = Instruction(match[2], operands)
    return code


def _step(binary: Path, arguments: list[str]) -> list[int]:
    with tempfile.NamedTemporaryFile() as file:
        done = subprocess.run(
            [str(binary), *arguments, file.name], capture_output=True, text=True, check=False
        )
        if done.returncode == 3:
            raise NotHereError(done.stderr.strip())
        if done.returncode != 0:
            raise RuntimeError(f"{binary.name} {' '.join(arguments)}: {done.stderr.strip()}")
        addresses = array.array("Q")
        addresses.frombytes(Path(file.name).read_bytes())
    return list(addresses)


def _log(binary: Path, arguments: list[str], qemu: list[str]) -> list[int]:
    """The same under qemu-user, whose log has a line for each instruction."""
    symbols = subprocess.run(["nm", str(binary)], capture_output=True, text=True, check=True).stdout
    address = {
        name: int(value, 16)
        for value, _, name in (
            line.split() for line in symbols.splitlines() if len(line.split()) == 3
        )
    }
    with tempfile.TemporaryDirectory() as folder:
        log = os.path.join(folder, "log")
        # Newer releases renamed the option.
        for single in ("-one-insn-per-tb", "-singlestep"):
            try:
                done = subprocess.run(
                    [*qemu, single, "-d", "exec,nochain", "-D", log, str(binary), *arguments, "-"],
                    capture_output=True,
                    text=True,
                    check=False,
                )
            except FileNotFoundError:
                raise NotHereError(f"{qemu[0]} is not installed") from None
            if done.returncode == 0:
                break
        else:
            raise RuntimeError(f"{binary.name} {' '.join(arguments)}: {done.stderr.strip()}")
        text = Path(log).read_bytes()
    addresses = [int(pc, 16) for pc in re.findall(rb"\[[0-9a-f]+/([0-9a-f]+)/", text)]
    begin = len(addresses) - addresses[::-1].index(address[_BEGIN])
    return addresses[begin : addresses.index(address[_END], begin)]


def trace(binary: Path, tier: str, m: int, n: int, k: int, qemu: list[str] | None) -> list[int]:
    """Addresses of all instructions of one GEMM with bf16 activations."""
    arguments = [tier, str(m), str(n), str(k), "bf16"]
    return _step(binary, arguments) if qemu is None else _log(binary, arguments, qemu)


@dataclass(frozen=True)
class Tracer:
    """Takes traces of one tier."""

    binary: Path
    tier: str
    qemu: list[str] | None
    code: dict[int, Instruction]

    def _counts(self, m: int, n: int, k: int) -> Counter[int]:
        """What 2 k rows of weights cost more than k."""
        counts = Counter(trace(self.binary, self.tier, m, n, 2 * k, self.qemu))
        counts.subtract(trace(self.binary, self.tier, m, n, k, self.qemu))
        return counts

    def steady_state(self, m: int, n: int, k: int) -> Steady:
        """Of [m, k] times [n, k]."""
        return _steady(self._counts(m, n, k), self.code, m, n, k)

    def wide_steady_state(self, m: int, n: int, k: int, times: int) -> Steady:
        """Of ``times`` n columns, without the wait: each count is linear in them."""
        narrow, wide = self._counts(m, n, k), self._counts(m, 2 * n, k)
        counts: Counter[int] = Counter()
        for pc in narrow.keys() | wide.keys():
            counts[pc] = narrow[pc] + (times - 1) * (wide[pc] - narrow[pc])
        return _steady(counts, self.code, m, times * n, k)


def _steady(counts: Counter[int], code: dict[int, Instruction], m: int, n: int, k: int) -> Steady:
    return Steady({pc: c for pc, c in counts.items() if c > 0 and pc in code}, code, n * k, m)
