"""The options of an engine stand once: constructor, documentation and flags say the same."""

import argparse
import inspect
from dataclasses import MISSING, dataclass, field, fields, replace
from multiprocessing import Pipe
from pathlib import Path
from typing import Any, get_type_hints

import pytest

from srt import Engine
from srt.cli.options import add_engine_options, add_flags, add_sampling_defaults, make_config
from srt.configs.engine_config import EngineConfig
from srt.configs.option import about, check_options, option_of, text
from srt.entrypoints.outputs import GenerateOutput
from srt.errors import OptionError
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_llama import TINY_CONFIG, make_tensors, quantize, write_checkpoint
from srt.test.tiny_tokenizer import VOCAB_SIZE, write_tokenizer

register_cpu_ci(est_time=5, suite="per-commit")


class Anything:
    """A value that no option takes."""


def parse(*arguments: str) -> argparse.Namespace:
    parser = argparse.ArgumentParser()
    add_engine_options(parser)
    add_sampling_defaults(parser.add_argument_group("sampling"))
    add_flags(parser.add_argument_group("server"), EngineConfig, "server")
    return parser.parse_args(arguments)


@pytest.mark.parametrize("name", [field.name for field in fields(EngineConfig)])
def test_every_option_has_a_help_a_check_and_a_default_that_passes(name: str) -> None:
    one = next(field for field in fields(EngineConfig) if field.name == name)
    option = option_of(one)
    assert len(option.help.split()) > 2
    assert option.help[0].islower() and not option.help.endswith(".")
    options: dict[str, Any] = {"model_path": "m", name: Anything()}
    with pytest.raises(OptionError, match=rf"^{name}: expected .*, found <.*Anything") as raised:
        EngineConfig(**options)
    assert raised.value.option == name
    assert isinstance(raised.value.found, Anything)
    is_optional = "None" in str(get_type_hints(EngineConfig)[name])
    assert is_optional == (one.default is None)
    if one.default is not MISSING and one.default is not None:
        assert option.check(one.default) is None


def test_a_field_without_help_and_check_is_noticed() -> None:
    @dataclass(frozen=True)
    class Config:
        known: str = field(default="a", metadata=about("what is known", text))
        unknown: str = "b"

    with pytest.raises(KeyError):
        check_options(Config())


def test_options_and_their_errors_can_be_sent_to_another_process() -> None:
    config = EngineConfig("m", max_running_requests=4)
    with pytest.raises(OptionError) as raised:
        EngineConfig("m", mem_fraction=2.0)
    receiver, sender = Pipe(duplex=False)
    with receiver, sender:
        sender.send(config)
        assert receiver.recv() == config
        sender.send(raised.value)
        received = receiver.recv()
    assert isinstance(received, OptionError)
    assert (str(received), vars(received)) == (str(raised.value), vars(raised.value))


def test_options_that_do_not_go_together() -> None:
    with pytest.raises(OptionError, match="compiled_batch_sizes: expected enable_torch_compile"):
        EngineConfig("m", compiled_batch_sizes=[4])
    EngineConfig("m", compiled_batch_sizes=[4], enable_torch_compile=True)


@pytest.mark.parametrize("documented", [Engine, EngineConfig])
def test_documentation_and_signature_tell_every_option(documented: type[Any]) -> None:
    names = [field.name for field in fields(EngineConfig)]
    assert list(inspect.signature(documented).parameters) == names
    lines = [line.strip() for line in (inspect.getdoc(documented) or "").splitlines()]
    for name in names:
        assert sum(line.startswith(f"{name}: ") for line in lines) == 1, name
    assert any("of two up to `max_running_requests`" in line for line in lines)


def test_flags_without_values_leave_the_defaults() -> None:
    assert make_config(parse("--model", "m")) == EngineConfig("m")


@pytest.mark.parametrize("name", [f.name for f in fields(EngineConfig) if option_of(f).flag])
def test_each_flag_sets_its_option_and_names_it_in_errors(name: str) -> None:
    one = next(field for field in fields(EngineConfig) if field.name == name)
    option = option_of(one)
    assert option.flag is not None
    others = {
        "model_path": "there",
        "revision": "v1",
        "packed_cache": "here",
        "mem_fraction": 0.25,
    }
    for flag in option.flag.names:
        if isinstance(one.default, bool):
            value: Any = not one.default
            given = [flag]
        else:
            value = option.choices[-1] if option.choices else others.get(name, 7)
            given = [flag, str(value)]
        model = [] if name == "model_path" else ["--model", "m"]
        assert make_config(parse(*model, *given)) == replace(EngineConfig("m"), **{name: value}), (
            flag
        )
    with pytest.raises(OptionError, match=f"^{option.flag.names[0]}: expected "):
        make_config(parse("--model", "m"), **{name: Anything()})


def test_what_the_command_decides_wins_over_flags() -> None:
    config = make_config(
        parse("--model", "m", "--sampling-defaults", "model"), sampling_defaults="greedy"
    )
    assert config.sampling_defaults == "greedy"


def test_an_engine_of_a_config_is_that_of_its_options(tmp_path: Path) -> None:
    content = TINY_CONFIG | {"vocab_size": VOCAB_SIZE}
    write_checkpoint(tmp_path, content, quantize(make_tensors(content)), {"quant_method": "fp8"})
    write_tokenizer(tmp_path)
    config = EngineConfig(tmp_path, max_total_tokens=64, progress=False)
    outputs: list[GenerateOutput] = []
    for make in (
        lambda: Engine(config),
        lambda: Engine(tmp_path, max_total_tokens=64, progress=False),
        lambda: Engine(model_path=tmp_path, max_total_tokens=64, progress=False),
    ):
        with make() as engine:
            assert engine.config == config
            outputs.append(engine.generate("a", {"max_new_tokens": 4}))
    assert outputs[0].token_ids == outputs[1].token_ids == outputs[2].token_ids


@pytest.mark.parametrize("arguments", [(), ("m", "n"), (EngineConfig("m"), "n")])
def test_arguments_that_make_no_config(arguments: tuple[Any, ...]) -> None:
    with pytest.raises(TypeError):
        Engine(*arguments)
    with pytest.raises(TypeError, match="no_option"):
        Engine("m", no_option=1)  # type: ignore[call-overload]
