"""`srt serve`: a model behind an HTTP API."""

import argparse
import importlib

from srt.cli.options import (
    add_engine_options,
    add_flags,
    add_sampling_defaults,
    make_config,
    read_flags,
)
from srt.configs.engine_config import EngineConfig
from srt.errors import SrtError
from srt.serve.config import ServerConfig
from srt.utils.kernels import check_kernel_version


def add_parser(subparsers: "argparse._SubParsersAction[argparse.ArgumentParser]") -> None:
    """Adds the command."""
    parser = subparsers.add_parser(
        "serve",
        help="serve a model over HTTP",
        description="Serves a model by OpenAI's and Anthropic's APIs. What clients send and get: "
        "docs/serving.md.",
    )
    add_engine_options(parser)
    group = parser.add_argument_group("server")
    add_flags(group, ServerConfig, "server")
    add_flags(group, EngineConfig, "server")
    add_sampling_defaults(parser.add_argument_group("sampling"))
    parser.set_defaults(func=run)


def run(args: argparse.Namespace) -> int:
    """Runs the command."""
    config = read_flags(args, ServerConfig)
    engine_config = make_config(args)
    check_kernel_version()
    with args.signals.importing():
        for module in ("fastapi", "uvicorn", "uvloop", "httptools", "prometheus_client"):
            try:
                importlib.import_module(module)
            except ImportError as error:
                raise SrtError(
                    f"srt serve needs the package {module} ({error}); run: "
                    "pip install 'sglang-srt-cpu[serve]'"
                ) from error
        from srt.serve.server import run_server

    return run_server(config, engine_config)
