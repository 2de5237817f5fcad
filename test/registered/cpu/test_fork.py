"""Engines in several processes: the ways that docs/cookbook.md calls safe."""

import json
import subprocess
import sys
from pathlib import Path

from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_text_model import FP8

register_cpu_ci(est_time=25, suite="per-commit")

PROGRAM = """
import json
import multiprocessing
import sys

from srt import Engine
from srt.errors import EngineStateError


def load():
    return Engine(sys.argv[1], max_total_tokens=64, num_threads=2, progress=False)


def answer(engine):
    params = {"temperature": 0, "max_new_tokens": 8, "ignore_eos": True}
    return list(engine.generate(input_ids=[5, 9, 100], sampling_params=params).token_ids)


def work(queue):
    with load() as engine:
        queue.put(answer(engine))


def use(engine, queue):
    try:
        queue.put(answer(engine))
    except EngineStateError as error:
        queue.put(str(error))


def run(kind, target, *arguments):
    context = multiprocessing.get_context(kind)
    queue = context.Queue()
    process = context.Process(target=target, args=(*arguments, queue))
    process.start()
    try:
        return queue.get(timeout=120)
    finally:
        process.kill()
        process.join()


if __name__ == "__main__":
    results = {"fork before use": run("fork", work)}
    with load() as engine:
        results["parent"] = answer(engine)
        results["spawn after use"] = run("spawn", work)
        results["the parent's engine"] = run("fork", use, engine)
    print(json.dumps(results))
"""


def test_safe_ways_and_the_unsafe_one(tmp_path: Path) -> None:
    config = TINY_CONFIG | {"max_position_embeddings": 128}
    write_checkpoint(tmp_path, config, quantize(make_tensors(config)), FP8)
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    result = subprocess.run(
        [sys.executable, str(program), str(tmp_path)], capture_output=True, text=True, timeout=300
    )
    assert result.returncode == 0, result.stderr
    outputs = json.loads(result.stdout)
    assert "loaded before the fork" in outputs.pop("the parent's engine")
    assert len(outputs["parent"]) == 8
    assert list(outputs.values()) == [outputs["parent"]] * 3
