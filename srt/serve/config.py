"""What a server is told besides its engine: each option's name, type, default, check, help and flag
once, as those of the engine in `srt.configs.engine_config`.

It loads no library of the server, so that `srt --help` is there at once.
"""

from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path

from srt.configs import option
from srt.configs.option import Flag, about, documented
from srt.errors import OptionError
from srt.serve.parsers.choice import AUTO, REASONING_PARSER_CHOICES, TOOL_CALL_PARSER_CHOICES

_MAX_PORT = 65_535


@documented()
@dataclass(frozen=True)
class ServerConfig:
    """The options of a server, checked as far as that can be done without opening anything.

    Args:
        OPTIONS

    Raises:
        OptionError: An option has a value that it cannot have, or two do not go together.
    """

    _: KW_ONLY
    host: str = field(
        default="127.0.0.1",
        metadata=about(
            "address to listen at; 0.0.0.0 is every IPv4 address of the machine",
            option.text,
            flag=Flag(("--host",), "server", "ADDRESS"),
        ),
    )
    port: int = field(
        default=30_000,
        metadata=about(
            "port to listen at; 0 takes one that is free",
            option.natural(_MAX_PORT),
            flag=Flag(("--port",), "server", "N"),
        ),
    )
    served_model_name: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "name of the model in requests and answers; may be repeated, answers have the first",
            option.texts,
            unset="the last part of MODEL",
            flag=Flag(("--served-model-name",), "server", "NAME"),
        ),
    )
    api_key: tuple[str, ...] | None = field(
        default=None,
        repr=False,
        metadata=about(
            "key that clients must give; may be repeated. Other users of the machine can read it "
            "in the list of processes: rather set SRT_API_KEY or give {api_key_file}",
            option.texts,
            flag=Flag(("--api-key",), "server", "KEY"),
        ),
    )
    api_key_file: str | Path | None = field(
        default=None,
        metadata=about(
            "file with a key a line",
            option.path,
            flag=Flag(("--api-key-file",), "server", "FILE"),
        ),
    )
    max_queued_requests: int = field(
        default=256,
        metadata=about(
            "most requests that wait to begin; further ones are told to come again (status 429)",
            option.natural(),
            flag=Flag(("--max-queued-requests",), "server", "N"),
        ),
    )
    request_timeout: float | None = field(
        default=None,
        metadata=about(
            "seconds that a request may take from when it is queued to its end",
            option.seconds,
            unset="no limit",
            flag=Flag(("--request-timeout",), "server", "SECONDS"),
        ),
    )
    drain_timeout: float = field(
        default=30.0,
        metadata=about(
            "seconds that running requests have to end after SIGTERM or Ctrl-C; a second signal "
            "ends at once",
            option.seconds,
            flag=Flag(("--drain-timeout",), "server", "SECONDS"),
        ),
    )
    ssl_certfile: str | Path | None = field(
        default=None,
        metadata=about(
            "certificate, with the chain behind it, in PEM; makes the server speak HTTPS",
            option.path,
            flag=Flag(("--ssl-certfile",), "server", "FILE"),
        ),
    )
    ssl_keyfile: str | Path | None = field(
        default=None,
        metadata=about(
            "its private key",
            option.path,
            unset="in {ssl_certfile}",
            flag=Flag(("--ssl-keyfile",), "server", "FILE"),
        ),
    )
    tool_call_parser: str = field(
        default=AUTO,
        metadata=about(
            "how the model writes tool calls; auto: as its chat template tells; none: no tools",
            option.one_of(TOOL_CALL_PARSER_CHOICES),
            choices=TOOL_CALL_PARSER_CHOICES,
            flag=Flag(("--tool-call-parser",), "server"),
        ),
    )
    reasoning_parser: str = field(
        default=AUTO,
        metadata=about(
            "how the model marks its reasoning, which answers have apart from their content; "
            "auto: as its chat template tells; none: it is content",
            option.one_of(REASONING_PARSER_CHOICES),
            choices=REASONING_PARSER_CHOICES,
            flag=Flag(("--reasoning-parser",), "server"),
        ),
    )
    allow_origin: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "site whose pages may use the server from a browser, such as https://chat.example; may "
            "be repeated, * is every site",
            option.texts,
            unset="none but its own",
            flag=Flag(("--allow-origin",), "server", "ORIGIN"),
        ),
    )
    allowed_host: tuple[str, ...] | None = field(
        default=None,
        metadata=about(
            "name by which clients may reach the server (their Host header); may be repeated, * is "
            "every name",
            option.texts,
            unset="every name; without keys at a loopback address those of this machine",
            flag=Flag(("--allowed-host",), "server", "NAME"),
        ),
    )
    max_body_bytes: int = field(
        default=8 << 20,
        metadata=about(
            "longest body of a request",
            option.integer(),
            flag=Flag(("--max-body-bytes",), "server", "BYTES"),
        ),
    )
    max_connections: int = field(
        default=1024,
        metadata=about(
            "most connections at a time; further ones are told to come again (status 503)",
            option.integer(),
            flag=Flag(("--max-connections",), "server", "N"),
        ),
    )
    receive_timeout: float = field(
        default=30.0,
        metadata=about(
            "seconds for the head of a request, and for each 64 KiB of its body",
            option.seconds,
            flag=Flag(("--receive-timeout",), "server", "SECONDS"),
        ),
    )
    send_timeout: float = field(
        default=60.0,
        metadata=about(
            "seconds that a client may leave an answer unread; its request is ended then",
            option.seconds,
            flag=Flag(("--send-timeout",), "server", "SECONDS"),
        ),
    )
    keep_alive_timeout: int = field(
        default=75,
        metadata=about(
            "seconds that a connection may wait for its next request",
            option.integer(),
            flag=Flag(("--keep-alive-timeout",), "server", "SECONDS"),
        ),
    )
    log_format: str = field(
        default="text",
        metadata=about(
            "how lines of the log are written",
            option.one_of(("text", "json")),
            choices=("text", "json"),
            flag=Flag(("--log-format",), "server"),
        ),
    )
    log_requests: bool = field(
        default=False,
        metadata=about(
            "log what requests and answers say, not only how long they took",
            option.truth,
            flag=Flag(("--log-requests",), "server"),
        ),
    )

    def __post_init__(self) -> None:
        option.check_options(self)
        if self.ssl_keyfile is not None and self.ssl_certfile is None:
            raise OptionError("ssl_keyfile", "ssl_certfile with it", str(self.ssl_keyfile))
