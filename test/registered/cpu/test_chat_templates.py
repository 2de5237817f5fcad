"""Chat templates: which one is used, what it is given, and what happens to one that fails, never
ends, or asks for the whole memory.
"""

import json
import os
import subprocess
import sys
import threading
import time
from pathlib import Path
from typing import Any

import pytest

from srt.errors import CheckpointError, RequestError
from srt.managers import chat_template
from srt.managers.chat_template import TemplateRenderer, get_renderer
from srt.managers.tokenizer import encode_chat, load_tokenizer, render_chat
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_tokenizer import CHAT_TEMPLATE, make_tokenizer, write_tokenizer

register_cpu_ci(est_time=12, suite="per-commit")

MESSAGES: list[dict[str, Any]] = [
    {"role": "system", "content": "s"},
    {"role": "user", "content": "hé 日本 <|x|> & 'quoted'"},
    {"role": "assistant", "content": "c", "reasoning": "because", "tool_calls": None},
]
# As models' own templates write: loops, macros, namespaces, filters, whitespace, dates.
TEMPLATES = [
    CHAT_TEMPLATE,
    "{%- for m in messages %}\n  {{- m.role ~ '\\n' + (m.content or '')|trim }}\n{%- endfor %}",
    "{{ bos_token }}{{ messages|tojson }}{{ messages|tojson(indent=2) }}{{ eos_token }}",
    "{% set ns = namespace(n=0, last='') %}{% for m in messages %}{% set ns.n = ns.n + 1 %}"
    "{% set ns.last = m.role %}{% endfor %}{{ ns.n }}{{ ns.last }}",
    "{% macro show(m) %}[{{ m.role|upper }}]{% endmacro %}{{ show(messages[0]) }}",
    "{% for m in messages %}{% if loop.first %}{% continue %}{% endif %}{{ m.role }}{% break %}"
    "{% endfor %}",
    "{% generation %}a{% endgeneration %}{{ messages[1:]|map(attribute='role')|join(', ') }}",
    "{{ messages[-1].reasoning_content }}|{{ messages[-1].thinking }}|{{ messages[-1].content }}",
    "{% if tools %}t{% endif %}{% if not documents %}d{% endif %}{{ undefined }}{{ x is defined }}",
    "{{ strftime_now('%Y') }}{{ dict(a=1) }}{{ range(3)|list }}{{ messages|length }}",
    "{{ messages[1].content.split(' ')[0].upper().strip('H') }}{{ '%s-%d'|format('a', 3) }}",
    "{% for m in messages if m.role != 'system' %}\n    {{ loop.index0 }}{{ m['role'] }}\n"
    "{% endfor %}",
]


@pytest.mark.parametrize("template", TEMPLATES)
def test_renders_as_transformers_does(template: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(MESSAGES, add_generation_prompt=True, tokenize=False)
    assert expected
    assert render_chat(tokenizer, MESSAGES) == expected


ENDLESS = {
    "loops": "{% for i in range(99999) %}{% for j in range(99999) %}{% endfor %}{% endfor %}",
    "filters": "{{ lipsum(10**7) }}",
    "powers": "{{ 7 ** (10**8) % 3 }}",
}
LARGE = {
    "product": "{{ 'x' * 10**10 }}",
    "centred": "{{ 'x'|center(10**10) }}",
    "format": "{{ '%10000000000s'|format('a') }}",
    "method": "{{ 'a'.ljust(10**10) }}",
    "indented": "{{ 'a\\nb'|indent(10**10) }}",
    "doubled": "{% set n = namespace(x='aa') %}{% for i in range(60) %}{% set n.x = n.x ~ n.x %}"
    "{% endfor %}",
    "joined": "{% set n = namespace(x=['aa']) %}{% for i in range(60) %}"
    "{% set n.x = [n.x|join, n.x|join] %}{% endfor %}",
    "lists": "{% set n = namespace(x=[1]) %}{% for i in range(60) %}{% set n.x = n.x + n.x %}"
    "{% endfor %}",
    "replaced": "{% set n = namespace(x='aa') %}{% for i in range(60) %}"
    "{% set n.x = n.x|replace('a', 'aa') %}{% endfor %}",
}
LONG = {
    "loop": "{% for i in range(99999) %}{{ 'abcdefgh' * 1000 }}{% endfor %}",
    "once": "{{ 'x' * 10**7 }}",
}
FAILING = {
    "division": ("{{ 1 / 0 }}", "ZeroDivisionError"),
    "recursion": ("{% macro f() %}{{ f() }}{% endmacro %}{{ f() }}", "RecursionError"),
    "include": ("{% include 'x' %}", "no loader"),
    "type": ("{{ 'a' + 1 }}", "TypeError"),
    "content": ("{{ messages[0].content + 1 }}", "TypeError"),
    "key": ("{{ messages[7].content.a }}", "no element 7"),
    "overflow": ("{{ 'a' * 10**30 }}", "OverflowError"),
    "strftime": ("{{ strftime_now(1) }}", "TypeError"),
    "syntax": ("{% for %}", "cannot be read: line 1"),
    "unknown-tag": ("\n\n{% frobnicate %}", "line 3"),
    "deep": ("{{ " + "(" * 5000 + "1" + ")" * 5000 + " }}", "template"),
    "raised": ("{{ raise_exception('first\nsecond') }}", "refuses the messages: first second"),
}


def expect(template: str, message: str) -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    started = time.monotonic()
    with pytest.raises(RequestError, match=message) as caught:
        encode_chat(tokenizer, [{"role": "user", "content": "a"}])
    assert time.monotonic() - started < 30
    assert str(caught.value).startswith("the chat template")
    assert "\n" not in str(caught.value)
    # The next conversation is served.
    assert encode_chat(make_tokenizer(), [{"role": "user", "content": "a"}])


@pytest.mark.parametrize(
    "name",
    [pytest.param(name, marks=() if name == "powers" else pytest.mark.slow) for name in ENDLESS],
)
def test_a_template_that_does_not_end(name: str) -> None:
    expect(ENDLESS[name], "2 seconds of processor time")


@pytest.mark.parametrize("name", LARGE)
def test_a_template_that_takes_the_memory(name: str) -> None:
    expect(LARGE[name], "more than (512 MB of memory|2 seconds)")


@pytest.mark.parametrize("name", LONG)
def test_a_template_that_writes_too_much(name: str) -> None:
    expect(LONG[name], r"writes more than 1,00\d,\d\d\d characters")


@pytest.mark.parametrize("name", FAILING)
def test_a_template_that_fails(name: str) -> None:
    expect(*FAILING[name])


def test_a_long_conversation_is_no_attack() -> None:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
    text = get_renderer().render(
        tokenizer.chat_template, {"messages": [{"content": "abcdefgh" * 1000}] * 1000}
    )
    assert len(text) == 8_000_000


def test_what_json_cannot_hold() -> None:
    loop: list[Any] = []
    loop.append(loop)
    with pytest.raises(RequestError, match="messages hold what JSON cannot"):
        encode_chat(make_tokenizer(), [{"role": "user", "content": "a", "tool": loop}])


def test_many_threads_share_the_process() -> None:
    renderer = TemplateRenderer()
    found: dict[int, str] = {}

    def ask(i: int) -> None:
        found[i] = renderer.render("{{ n }}" * 1000, {"n": i})

    threads = [threading.Thread(target=ask, args=(i,)) for i in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    renderer.close()
    assert found == {i: str(i) * 1000 for i in range(8)}


def test_the_process_is_started_again() -> None:
    renderer = TemplateRenderer()
    assert renderer.render("a", {}) == "a"
    process: Any = renderer._process
    process.kill()
    process.wait()
    assert renderer.render("b", {}) == "b"
    renderer.close()
    assert renderer._process is None


def test_a_process_that_was_just_leaving_is_followed_by_another(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """It leaves when idle; a request may come at that moment, or when it reads no more."""
    renderer, start = TemplateRenderer(), chat_template._start
    leaving = "import sys; sys.stdin.buffer.read(9)"
    programs = [leaving, ""]

    def start_one_that_leaves() -> Any:
        if not programs:
            return start()
        pipe = subprocess.PIPE
        return subprocess.Popen([sys.executable, "-c", programs.pop()], stdin=pipe, stdout=pipe)

    monkeypatch.setattr(chat_template, "_start", start_one_that_leaves)
    with pytest.raises(RequestError, match="ended with status 0"):
        renderer.render("hello", {})
    programs.append(leaving)
    assert renderer.render("hello", {}) == "hello"
    renderer.close()


def test_a_forked_child_has_a_process_of_its_own() -> None:
    renderer = TemplateRenderer()
    assert renderer.render("a", {}) == "a"
    process: Any = renderer._process
    pid = os.fork()
    if pid == 0:
        status = 1
        try:
            status = 0 if renderer.render("b", {}) == "b" and renderer._process != process else 2
            renderer.close()
        finally:
            os._exit(status)
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert renderer.render("c", {}) == "c"
    assert renderer._process is process
    renderer.close()


# ---- which template ----


def settings(directory: Path, value: object) -> None:
    file = directory / "tokenizer_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {"chat_template": value}))


@pytest.fixture
def directory(tmp_path: Path) -> Path:
    write_tokenizer(tmp_path, chat_template=False)
    return tmp_path


def template_of(directory: Path) -> Any:
    tokenizer: Any = load_tokenizer(directory)
    return tokenizer.chat_template


def test_places_of_templates(directory: Path) -> None:
    assert template_of(directory) is None
    (directory / "chat_template.json").write_text(json.dumps({"chat_template": "json"}))
    assert template_of(directory) == "json"
    settings(
        directory, [{"name": "tool_use", "template": "t"}, {"name": "default", "template": "d"}]
    )
    assert template_of(directory) == "d"
    settings(directory, "config")
    assert template_of(directory) == "config"
    (directory / "additional_chat_templates").mkdir()
    (directory / "additional_chat_templates" / "rag.jinja").write_text("rag")
    (directory / "chat_template.jinja").write_text("jinja")
    assert template_of(directory) == "jinja"


def test_one_template_under_another_name(directory: Path) -> None:
    settings(directory, [{"name": "tool_use", "template": "t"}])
    assert template_of(directory) == "t"


def test_several_templates_and_no_default(directory: Path) -> None:
    settings(directory, [{"name": n, "template": n} for n in ("rag", "tool_use")])
    tokenizer: Any = load_tokenizer(directory)
    with pytest.raises(RequestError, match=r"several chat templates \(rag, tool_use\)"):
        encode_chat(tokenizer, [{"role": "user", "content": "a"}])
    (directory / "tokenizer_config.json").write_text("{}")
    (directory / "additional_chat_templates").mkdir()
    for name in ("a", "b"):
        (directory / "additional_chat_templates" / f"{name}.jinja").write_text(name)
    assert template_of(directory) == {"a": "a", "b": "b"}


@pytest.mark.parametrize("value", [5, [1], [{"name": "default"}], {"default": "x"}, [["a", "b"]]])
def test_something_else_than_a_template(directory: Path, value: object) -> None:
    settings(directory, value)
    with pytest.raises(CheckpointError, match="chat_template is not a template"):
        load_tokenizer(directory)


@pytest.mark.parametrize("content", [b"\xff\xfe", b"x" * (3 << 20)])
def test_a_template_file_that_is_none(directory: Path, content: bytes) -> None:
    (directory / "chat_template.jinja").write_bytes(content)
    with pytest.raises(CheckpointError, match=r"chat_template\.jinja"):
        load_tokenizer(directory)
