"""lm-eval against a live server: its figures are those of `Engine` in process."""

import json
import math
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from srt import Engine, SamplingParams
from srt.test.ci_register import register_cpu_ci
from srt.test.live_server import DEMO_MODEL, LiveServer, live_server

register_cpu_ci(est_time=90, suite="full")
pytest.importorskip("lm_eval", reason="needs lm-eval[api]")

DOCUMENTS: list[dict[str, Any]] = [
    {"question": "The capital of France is", "choices": ["Paris", "Rome", "a fish"], "gold": 0},
    {"question": "Water is made of", "choices": ["sand", "hydrogen and oxygen"], "gold": 1},
    {"question": "Zwei und zwei ist", "choices": ["fünf", "vier"], "gold": 1},
]
SCORED = """
task: local_choices
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: multiple_choice
doc_to_text: "{{{{question}}}}"
doc_to_choice: "{{{{choices}}}}"
doc_to_target: "{{{{gold}}}}"
metric_list: [{{metric: acc}}]
"""
WRITTEN = """
task: local_answers
dataset_path: json
dataset_kwargs: {{data_files: {{test: {data}}}}}
test_split: test
output_type: generate_until
doc_to_text: "{{{{question}}}}"
doc_to_target: "{{{{choices[gold]}}}}"
generation_kwargs: {{until: ["."], max_gen_toks: 12, do_sample: false}}
metric_list: [{{metric: exact_match}}]
"""
WRITTEN_PARAMS = SamplingParams(temperature=0, max_new_tokens=12, stop=["."])


@pytest.fixture(scope="module")
def server() -> Iterator[LiveServer]:
    if not DEMO_MODEL.is_dir():
        pytest.skip("needs the demo model: make demo-model")
    # lm-eval sends other parameters to a model whose name has a 5 in it.
    with live_server(options=["--served-model-name", "demo"]) as running:
        yield running


@pytest.fixture(scope="module")
def engine() -> Iterator[Engine]:
    if not DEMO_MODEL.is_dir():
        pytest.skip("needs the demo model: make demo-model")
    with Engine(DEMO_MODEL, progress=False, max_total_tokens=2000) as running:
        yield running


def _evaluate(
    server: LiveServer, directory: Path, model: str, path: str, tasks: list[str], *options: str
) -> tuple[dict[str, Any], dict[str, list[dict[str, Any]]]]:
    """The results of tasks, and what was asked and answered, as lm-eval's command writes them."""
    data = directory / "documents.jsonl"
    data.write_text("".join(json.dumps(document) + "\n" for document in DOCUMENTS))
    for text in (SCORED, WRITTEN):
        name = text.split()[1]
        (directory / f"{name}.yaml").write_text(text.format(data=data))
    arguments = (
        f"model=demo,base_url={server.url}{path},tokenizer={DEMO_MODEL},num_concurrent=3,"
        "max_retries=1"
    )
    command = [sys.executable, "-m", "lm_eval", "run", "--model", model, "--tasks", *tasks]
    command += ["--model_args", arguments, "--include_path", str(directory), "--log_samples"]
    command += ["--output_path", str(directory / "out"), *options]
    env = {"HF_HOME": str(directory / "home"), "HF_HUB_OFFLINE": "1", "HF_DATASETS_OFFLINE": "1"}
    env |= {"PATH": "/usr/bin:/bin", "HOME": str(directory), "OPENAI_API_KEY": "none"}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-4000:]
    (results,) = (directory / "out").rglob("results_*.json")
    samples = {}
    for task in tasks:
        (file,) = (directory / "out").rglob(f"samples_{task}_*.jsonl")
        samples[task] = [json.loads(line) for line in file.read_text().splitlines()]
    return json.loads(results.read_text())["results"], samples


def _score(engine: Engine, context: str, ending: str) -> tuple[float, bool]:
    """The log-probability of an ending, and whether each token of it is the most likely."""
    tokenizer = engine.tokenizer
    assert tokenizer is not None
    start = len(tokenizer.encode(context))
    ids = tokenizer.encode(context + ending)
    params = SamplingParams(
        temperature=0, max_new_tokens=1, return_prompt_logprob=True, top_logprobs_num=1
    )
    entries = engine.generate(input_ids=ids, sampling_params=params).prompt_logprobs
    assert entries is not None
    scored = [entry for entry in entries[start:] if entry is not None]
    assert len(scored) == len(ids) - start
    return (
        sum(entry.logprob for entry in scored),
        all(entry.logprob == entry.top[0][1] for entry in scored),
    )


def test_local_completions(server: LiveServer, engine: Engine, tmp_path: Path) -> None:
    tasks = ["local_choices", "local_answers"]
    results, samples = _evaluate(
        server, tmp_path, "local-completions", "/v1/completions", tasks, "--batch_size", "2"
    )
    right = 0
    assert len(samples["local_choices"]) == len(DOCUMENTS)
    for sample in samples["local_choices"]:
        document = sample["doc"]
        expected = [
            _score(engine, document["question"], f" {choice}") for choice in document["choices"]
        ]
        found = [(float(one[0][0]), str(one[0][1]) == "True") for one in sample["resps"]]
        assert found == expected
        values = [value for value, _ in expected]
        right += values.index(max(values)) == document["gold"]
    assert math.isclose(results["local_choices"]["acc,none"], right / len(DOCUMENTS))
    for sample in samples["local_answers"]:
        prompt = sample["doc"]["question"]
        assert sample["resps"] == [[engine.generate(prompt, WRITTEN_PARAMS).text]]


def test_local_chat_completions(server: LiveServer, engine: Engine, tmp_path: Path) -> None:
    _, samples = _evaluate(
        server,
        tmp_path,
        "local-chat-completions",
        "/v1/chat/completions",
        ["local_answers"],
        "--apply_chat_template",
    )
    assert len(samples["local_answers"]) == len(DOCUMENTS)
    for sample in samples["local_answers"]:
        messages: list[Any] = [{"role": "user", "content": sample["doc"]["question"]}]
        text = engine.generate(messages=messages, sampling_params=WRITTEN_PARAMS).text
        assert sample["resps"] == [[text]]
