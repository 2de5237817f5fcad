"""Renders chat templates in a process of its own: `srt.managers.chat_template` starts it and says
what to do. It imports Jinja and nothing else of size, so that it starts in a tenth of a second.

A template is a program that comes with a checkpoint. The sandbox keeps it from Python's inside, as
in transformers; the system keeps it from taking more memory and processor time than a conversation
can need: a template that does ends this process and nothing else.

Frames on stdin and stdout: 8 bytes of length, little-endian, then JSON in UTF-8 (surrogates pass).
In: {"template", "variables", "max_characters"}. Out: {"text"}, or {"problem", "message"} where
problem is `refused` (the template raised it), `syntax`, `failed`, `long` or `memory`.

    python -I -S template_worker.py PATH... SECONDS BYTES
"""

import json
import resource
import select
import signal
import sys
from collections.abc import Callable
from datetime import datetime
from functools import lru_cache
from typing import Any

# Seconds without work after which the process leaves; another is started when there is some.
_IDLE_SECONDS = 300


def make_environment() -> Any:
    """The environment that transformers renders chat templates in."""
    import jinja2
    import jinja2.ext
    from jinja2.sandbox import ImmutableSandboxedEnvironment

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks the model's own words for training; here it has no effect."""

        tags = {"generation"}  # noqa: RUF012  as the base class has it

        def parse(self, parser: Any) -> Any:
            next(parser.stream)
            return parser.parse_statements(("name:endgeneration",), drop_needle=True)

    class Namespace(jinja2.utils.Namespace):
        # Without a named self, so that `namespace(self=...)` works, as in Jinja.
        def __init__(*args: Any, **kwargs: Any) -> None:
            self, args = args[0], args[1:]
            values = dict(*args, **kwargs)
            for name in values:
                _check_name(name)
            jinja2.utils.Namespace.__init__(self, values)

        def __setitem__(self, name: str, value: Any) -> None:
            _check_name(name)
            super().__setitem__(name, value)

    def _check_name(name: object) -> None:
        if isinstance(name, str) and name.startswith("_"):
            raise jinja2.exceptions.SecurityError(f"a namespace cannot hold {name!r}")

    class Dict:
        """`dict` without the type's own attributes."""

        def __call__(self, *args: Any, **kwargs: Any) -> dict[Any, Any]:
            return dict(*args, **kwargs)

        def fromkeys(self, *args: Any) -> dict[Any, Any]:
            return dict.fromkeys(*args)

    def raise_exception(message: object) -> None:
        raise jinja2.TemplateError(str(message))

    def tojson(
        value: Any,
        ensure_ascii: bool = False,
        indent: Any = None,
        separators: Any = None,
        sort_keys: bool = False,
    ) -> str:
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    environment = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[Generation, jinja2.ext.loopcontrols]
    )
    environment.filters["tojson"] = tojson
    environment.globals["raise_exception"] = raise_exception
    environment.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    environment.globals["dict"] = Dict()
    environment.globals["namespace"] = Namespace
    return environment


def make_renderer() -> Callable[[dict[str, Any]], dict[str, str]]:
    """Answers a request of the protocol; never raises but for lack of memory."""
    import jinja2

    compile_template = lru_cache(maxsize=8)(make_environment().from_string)

    def render(request: dict[str, Any]) -> dict[str, str]:
        parts: list[str] = []
        left: int = request["max_characters"]
        try:
            for part in compile_template(request["template"]).generate(**request["variables"]):
                left -= len(part)
                if left < 0:
                    return _problem("long", f"more than {request['max_characters']:,} characters")
                parts.append(part)
        except jinja2.TemplateSyntaxError as error:
            return _problem("syntax", f"line {error.lineno}: {error.message}")
        except jinja2.TemplateError as error:
            return _problem("refused", str(error.message or type(error).__name__))
        except MemoryError:
            raise
        except Exception as error:  # noqa: BLE001  a template provokes what it likes
            return _problem("failed", f"{type(error).__name__}: {error}")
        return {"text": "".join(parts)}

    return render


def _problem(kind: str, message: str) -> dict[str, str]:
    return {"problem": kind, "message": message}


def _answer(reply: dict[str, str]) -> None:
    content = json.dumps(reply, ensure_ascii=False).encode("utf-8", "surrogatepass")
    sys.stdout.buffer.write(len(content).to_bytes(8, "little") + content)
    sys.stdout.buffer.flush()


def _limit(max_bytes: int) -> None:
    for kind, value in (
        (resource.RLIMIT_AS, max_bytes),
        (resource.RLIMIT_FSIZE, 0),
        (resource.RLIMIT_CORE, 0),
    ):
        hard = resource.getrlimit(kind)[1]
        lowest = value if hard == resource.RLIM_INFINITY else min(value, hard)
        resource.setrlimit(kind, (lowest, lowest))


def serve(seconds: float, max_bytes: int) -> None:
    """Answers until stdin ends, or nobody asks for a while."""
    render = make_renderer()
    _limit(max_bytes)
    # No handler: the signal ends the process inside of whatever it computes.
    signal.signal(signal.SIGPROF, signal.SIG_DFL)
    stdin = sys.stdin.buffer
    while select.select([stdin], [], [], _IDLE_SECONDS)[0]:
        size = stdin.read(8)
        if len(size) < 8:
            return
        signal.setitimer(signal.ITIMER_PROF, seconds)
        try:
            content = stdin.read(int.from_bytes(size, "little"))
            reply = render(json.loads(content.decode("utf-8", "surrogatepass")))
            del content
            _answer(reply)
        except MemoryError:
            reply = {}
            _answer(_problem("memory", f"more than {max_bytes >> 20} MB of memory"))
            return
        signal.setitimer(signal.ITIMER_PROF, 0)


if __name__ == "__main__":
    *paths, seconds, max_bytes = sys.argv[1:]
    sys.path[:0] = paths
    serve(float(seconds), int(max_bytes))
