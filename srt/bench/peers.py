"""Peers on the same machine in the same run: llama.cpp's `llama-bench`, and transformers."""

import inspect
import json
import shutil
import subprocess
import time
from pathlib import Path
from typing import Any

import torch

from srt.bench.workload import Case, Contender, Measurement, random_prompts
from srt.configs.hf_transformers import load_hf_model
from srt.errors import SrtError

_LLAMA_BENCH = "llama-bench"


class LlamaBench(Contender):
    """llama.cpp on a GGUF file of the same model; one prompt at a time is what its tool measures.

    Args:
        gguf: The file.
        program: Path of `llama-bench`. It gets as many threads as Torch has here.
    """

    def __init__(self, gguf: Path, program: str) -> None:
        self.name = f"llama.cpp {gguf.stem.rpartition('.')[2]}"
        self._program = [program, "-m", str(gguf)]

    @classmethod
    def find(cls, gguf: Path) -> "LlamaBench":
        """The one on PATH.

        Raises:
            SrtError: There is none, or no such file.
        """
        program = shutil.which(_LLAMA_BENCH)
        if program is None:
            raise SrtError(f"--gguf needs {_LLAMA_BENCH} on PATH; found none")
        if not gguf.is_file():
            raise SrtError(f"--gguf: no file {gguf}")
        return cls(gguf, program)

    def supports(self, case: Case) -> bool:
        return case.batch == 1

    def run(self, case: Case) -> Measurement:
        # -n starts from an empty cache unless -d says how many tokens come before.
        prefill = self._speed(["-p", str(case.input_len), "-n", "0"])
        decode = self._speed(["-p", "0", "-n", str(case.output_len), "-d", str(case.input_len)])
        return Measurement(prefill, decode)

    def _speed(self, options: list[str]) -> float:
        common = ["-t", str(torch.get_num_threads()), "-r", "1", "-o", "json"]
        done = subprocess.run([*self._program, *common, *options], capture_output=True, text=True)
        try:
            results = json.loads(done.stdout)
            return float(results[0]["avg_ts"])
        except (ValueError, LookupError, TypeError) as error:
            last = (done.stderr.strip().splitlines() or ["nothing on stderr"])[-1]
            raise SrtError(
                f"{_LLAMA_BENCH} failed with status {done.returncode}: {last}"
            ) from error


class Transformers(Contender):
    """transformers over an unquantized checkpoint, greedy, with its default cache.

    Args:
        model: Directory of the checkpoint.
        dtype: `bfloat16` or `float32`.
    """

    def __init__(self, model: Path, dtype: str) -> None:
        self.name = f"transformers {dtype}"
        try:
            self._model: Any = load_hf_model(model, getattr(torch, dtype))
        except SrtError as error:
            raise SrtError(f"transformers cannot load {model}: {error}") from error
        # transformers 5.x has renamed it.
        parameters = inspect.signature(self._model.forward).parameters
        self._cache = "cache" if "cache" in parameters else "past_key_values"

    def run(self, case: Case) -> Measurement:
        ids = torch.tensor(random_prompts(case, self._model.config.vocab_size))
        with torch.inference_mode():
            started = time.perf_counter()
            out = self._model(ids, use_cache=True, logits_to_keep=1)
            token = out.logits[:, -1:].argmax(-1)
            prefilled = time.perf_counter()
            for _ in range(case.output_len - 1):
                out = self._model(token, use_cache=True, **{self._cache: out[self._cache]})
                token = out.logits[:, -1:].argmax(-1)
            ended = time.perf_counter()
        return Measurement(
            case.batch * case.input_len / (prefilled - started),
            case.batch * (case.output_len - 1) / (ended - prefilled),
        )
