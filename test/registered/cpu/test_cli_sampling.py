"""The command line's options of sampling, of log-probabilities and of the chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

from srt.cli.main import main, make_parser
from srt.cli.sampling_options import make_sampling_params
from srt.sampling.sampling_params import SamplingParams
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_text_model import write_text_model

register_cpu_ci(est_time=12, suite="per-commit")


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> str:
    directory = tmp_path_factory.mktemp("cli")
    return str(write_text_model(directory))


@pytest.mark.parametrize("command", ["generate", "chat"])
@pytest.mark.parametrize(
    ("options", "expected"),
    [
        ([], {}),
        (["--temperature", "0.5", "--top-k", "0"], {"temperature": 0.5, "top_k": 0}),
        (["--top-p", "0.9", "--min-p", "0.1"], {"top_p": 0.9, "min_p": 0.1}),
        (["--repetition-penalty", "1.1"], {"repetition_penalty": 1.1}),
        (
            ["--presence-penalty", "0.5", "--frequency-penalty", "-0.5"],
            {"presence_penalty": 0.5, "frequency_penalty": -0.5},
        ),
        (["--logit-bias", "5=-1.5", "--logit-bias", "6=2"], {"logit_bias": {5: -1.5, 6: 2}}),
        (["--min-tokens", "3"], {"min_new_tokens": 3}),
        (
            ["--min-new-tokens", "3", "--max-new-tokens", "4"],
            {"min_new_tokens": 3, "max_new_tokens": 4},
        ),
        (["--stop", "a", "--stop", "</s>"], {"stop": ("a", "</s>")}),
        (["--stop-token-ids", "5", "6"], {"stop_token_ids": (5, 6)}),
        (
            ["--ignore-eos", "--no-skip-special-tokens"],
            {"ignore_eos": True, "skip_special_tokens": False},
        ),
        (["--seed", str(2**64 - 1)], {"seed": 2**64 - 1}),
    ],
)
def test_options_are_the_parameters(
    command: str, options: list[str], expected: dict[str, Any]
) -> None:
    """What is not given is as in Python."""
    prompt = ["--prompt", "x"] if command == "generate" else []
    args = make_parser().parse_args([command, "--model", "m", *prompt, *options])
    assert make_sampling_params(args) == SamplingParams(**expected)
    assert args.sampling_defaults == "model"


@pytest.mark.parametrize(
    ("options", "message"),
    [
        (
            ["--seed", str(2**64)],
            "sampling parameter seed: expected an integer from 0 to 2**64 - 1",
        ),
        (["--seed", "-1"], "sampling parameter seed"),
        (["--temperature", "nan"], "sampling parameter temperature"),
        (["--min-tokens", "9", "--max-new-tokens", "8"], "sampling parameter min_new_tokens"),
        (["--logit-bias", "5"], "--logit-bias: expected a token id and a number such as 42=-1.5"),
        (["--logit-bias", "x=1"], "--logit-bias: expected a token id and a number"),
        (["--logit-bias=-1=1"], "sampling parameter logit_bias"),
        (["--stop", ""], "sampling parameter stop"),
        (["--chat-template-kwargs", "{"], "--chat-template-kwargs is not JSON"),
        (["--chat-template-kwargs", "[" * 100_000], "--chat-template-kwargs is not JSON"),
        (["--chat-template-kwargs", "[1]"], "--chat-template-kwargs: expected an object"),
        (["--logprobs"], "--logprobs and --prompt-logprobs need --json"),
        (["--json", "--top-logprobs", "2"], "--top-logprobs needs --logprobs"),
        (["--json", "--logprobs", "--top-logprobs", "-2"], "parameter top_logprobs_num"),
    ],
)
def test_bad_options_are_one_line_before_the_model_is_loaded(
    options: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["generate", "--model", "/nonexistent", "--prompt", "x", *options]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.startswith("srt: error: ")
    assert message in err
    assert err.count("\n") == 1


def output_of(capsys: pytest.CaptureFixture[str], model: str, *options: str) -> dict[str, Any]:
    command = ["generate", "--model", model, "--prompt", "hi", "--json"]
    assert main([*command, "--max-new-tokens", "4", *options]) == 0
    output: dict[str, Any] = json.loads(capsys.readouterr().out)["outputs"][0]
    return output


def test_log_probabilities_as_json(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--logprobs", "--top-logprobs", "2", "--prompt-logprobs", "--ignore-eos"]
    output = output_of(capsys, model, *options)
    assert [entry["token_id"] for entry in output["logprobs"]] == output["token_ids"]
    assert all(len(entry["top"]) == 2 for entry in output["logprobs"])
    assert len(output["prompt_logprobs"]) == output["prompt_tokens"]
    assert output["prompt_logprobs"][0] is None


def test_biases_stops_and_defaults_take_effect(
    model: str, capsys: pytest.CaptureFixture[str]
) -> None:
    eos = output_of(capsys, model, "--logit-bias", "2=1000")
    assert (eos["token_ids"], eos["matched_stop"]) == ([2], 2)
    stop = output_of(capsys, model, "--logit-bias", "1=1000", "--stop", "<s><s>")
    assert (stop["token_ids"], stop["matched_stop"]) == ([1, 1], "<s><s>")
    file = Path(model) / "generation_config.json"
    file.write_text(json.dumps({"do_sample": True, "temperature": 100.0}))
    try:
        hot = [output_of(capsys, model, "--ignore-eos", "--seed", s)["token_ids"] for s in "12"]
        greedy = ["--ignore-eos", "--sampling-defaults", "greedy"]
        cold = [output_of(capsys, model, *greedy, "--seed", s)["token_ids"] for s in "12"]
    finally:
        file.unlink()
    assert hot[0] != hot[1]
    assert cold[0] == cold[1]


def test_variables_of_the_chat_template(model: str, capsys: pytest.CaptureFixture[str]) -> None:
    plain = output_of(capsys, model)["prompt_tokens"]
    file = Path(model) / "chat_template.jinja"
    before = file.read_text()
    file.write_text("{% if enable_thinking %}think{% endif %}" + before)
    try:
        kwargs = ["--chat-template-kwargs", '{"enable_thinking": true}']
        assert output_of(capsys, model, *kwargs)["prompt_tokens"] == plain + len("think")
        assert output_of(capsys, model)["prompt_tokens"] == plain
    finally:
        file.write_text(before)
