"""What chat templates see of tools and calls; what they write of calls is what parsers read."""

import json
from collections.abc import Sequence
from typing import Any

import pytest

from srt.errors import RequestError
from srt.managers.tokenizer import ChatOptions, render_chat
from srt.serve.parsers.choice import TOOL_CALL_PARSERS, AnswerParsers
from srt.serve.parsers.tool_calls import Tool
from srt.test.ci_register import register_cpu_ci
from srt.test.tiny_tokenizer import make_tokenizer

register_cpu_ci(est_time=6, suite="per-commit")

# In each the form of a call is that of the model's own template, its instructions are left out.
_MESSAGES = "{% for m in messages %}{% if m.tool_calls %}"
_OTHERS = "{% else %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endif %}{% endfor %}"
_ASK = "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"
QWEN3 = (
    "{% if tools %}<tools>{% for t in tools %}\n{{ t | tojson }}{% endfor %}</tools>{% endif %}"
    + _MESSAGES
    + "<|im_start|>assistant\n{{ m.content }}{% for c in m.tool_calls %}"
    "{% if not loop.first or m.content %}{{ '\n' }}{% endif %}{% set c = c.function %}"
    '<tool_call>\n{"name": "{{ c.name }}", "arguments": {% if c.arguments is string %}'
    "{{ c.arguments }}{% else %}{{ c.arguments | tojson }}{% endif %}}\n</tool_call>"
    "{% endfor %}<|im_end|>\n" + _OTHERS + _ASK
)
QWEN_CODER = (
    "{% if tools %}{{ tools | tojson }}{% endif %}" + _MESSAGES + "<|im_start|>assistant\n"
    "{{ m.content }}{% for c in m.tool_calls %}{{ '\n' }}<tool_call>\n"
    "<function={{ c.function.name }}>\n{% for k, v in c.function.arguments | items %}"
    "<parameter={{ k }}>\n{{ v | tojson if v is mapping or (v is sequence and v is not string) "
    "else v | string }}\n</parameter>\n{% endfor %}</function>\n</tool_call>{% endfor %}"
    "<|im_end|>\n" + _OTHERS + _ASK
)
LLAMA3 = (
    "{% for m in messages %}<|start_header_id|>{{ 'ipython' if m.role == 'tool' else m.role }}"
    "<|end_header_id|>\n\n{% if 'tool_calls' in m %}{% if m.tool_calls | length != 1 %}"
    "{{ raise_exception('one call only') }}{% endif %}{% set c = m.tool_calls[0].function %}"
    '{"name": "{{ c.name }}", "parameters": {{ c.arguments | tojson }}}'
    "{% else %}{% if tools and loop.first %}{{ tools | tojson(indent=4) }}{% endif %}"
    "{{ m.content | trim }}{% endif %}<|eot_id|>{% endfor %}"
    "{% if add_generation_prompt %}<|start_header_id|>assistant<|end_header_id|>\n\n{% endif %}"
)
MISTRAL = (
    "{% for m in messages %}{% if m.tool_calls %}[TOOL_CALLS][{% for c in m.tool_calls %}"
    "{% if c.id | length != 9 %}{{ raise_exception('nine letters') }}{% endif %}"
    '{{ (c.function | tojson)[:-1] }}, "id": "{{ c.id }}"}{{ ", " if not loop.last }}'
    "{% endfor %}]</s>{% elif m.role == 'user' %}{% if tools and loop.last %}"
    "[AVAILABLE_TOOLS]{{ tools | tojson }}[/AVAILABLE_TOOLS]{% endif %}[INST]{{ m.content }}[/INST]"
    "{% else %}{{ m.content }}</s>{% endif %}{% endfor %}"
)
MISTRAL_NAMED = (
    "{% for m in messages %}{% if m.tool_calls %}{% for c in m.tool_calls %}"
    "[TOOL_CALLS]{{ c.function.name }}[CALL_ID]{{ c.id }}[ARGS]{{ c.function.arguments | tojson }}"
    "{% endfor %}</s>{% else %}[INST]{{ m.content }}[/INST]{{ tools }}{% endif %}{% endfor %}"
)
DEEPSEEK_R1 = (
    "{% if tools %}{{ tools | tojson }}{% endif %}{% for m in messages %}"
    "{%- if m.role == 'assistant' and m['tool_calls'] %}{% for c in m['tool_calls'] %}"
    "{{ '<｜Assistant｜><｜tool▁calls▁begin｜>' if loop.first else '\n' }}"
    "{{ '<｜tool▁call▁begin｜>' + c['type'] + '<｜tool▁sep｜>' + c['function']['name'] }}"
    "{{ '\n```json\n' + c['function']['arguments'] + '\n```<｜tool▁call▁end｜>' }}{% endfor %}"
    "<｜tool▁calls▁end｜><｜end▁of▁sentence｜>{% endif %}"
    "{%- if m.role == 'assistant' and m['content'] is not none %}"
    "{{ '<｜Assistant｜>' + m['content'] + '<｜end▁of▁sentence｜>' }}"
    "{%- elif m.role == 'user' %}{{ '<｜User｜>' + m['content'] }}{% endif %}{% endfor %}"
    "{% if add_generation_prompt %}<｜Assistant｜><think>\n{% endif %}"
)
DEEPSEEK_V31 = (
    "{{ tools }}{% for m in messages %}{% if m.tool_calls %}<｜Assistant｜></think>"
    "{{ m.content or '' }}<｜tool▁calls▁begin｜>{% for c in m.tool_calls %}"
    "{{ '<｜tool▁call▁begin｜>' + c.function.name + '<｜tool▁sep｜>' + c.function.arguments "
    "+ '<｜tool▁call▁end｜>' }}{% endfor %}<｜tool▁calls▁end｜><｜end▁of▁sentence｜>"
    "{% else %}<｜User｜>{{ m.content }}{% endif %}{% endfor %}"
)
TEMPLATES = {
    "hermes": QWEN3,
    "qwen3_coder": QWEN_CODER,
    "llama3_json": LLAMA3,
    "mistral": MISTRAL,
    "mistral, named": MISTRAL_NAMED,
    "deepseek_v3": DEEPSEEK_R1,
    "deepseek_v31": DEEPSEEK_V31,
}
TOOLS: list[dict[str, Any]] = [
    {
        "type": "function",
        "function": {
            "name": name,
            "description": "Does <it>.",
            "parameters": {
                "type": "object",
                "properties": {
                    "a": {"type": "integer"},
                    "text": {"type": "string"},
                    "list": {"type": "array"},
                    "flag": {"type": "boolean"},
                    "nothing": {"type": ["string", "null"]},
                },
            },
        },
    }
    for name in ("add", "get_weather")
]
# What a format of tags and one of JSON get wrong when they are careless.
ARGUMENTS: list[dict[str, Any]] = [
    {"a": 1, "text": 'two\n\n"lines" {[ été 日本 \\n', "list": [1, {"b": "c"}]},
    {"text": "17", "flag": True, "nothing": None},
    {"text": "", "a": -5},
    {},
]


def conversation(calls: Sequence[dict[str, Any]], content: str | None = None) -> list[Any]:
    """A conversation as OpenAI's client sends it, whose last message calls."""
    tool_calls = [
        {
            "id": f"abcdefgh{i}",
            "type": "function",
            "function": {"name": "add", "arguments": json.dumps(arguments)},
        }
        for i, arguments in enumerate(calls)
    ]
    return [
        {"role": "user", "content": "Question"},
        {"role": "assistant", "content": content, "tool_calls": tool_calls},
    ]


def render(template: str, messages: Sequence[Any], **options: Any) -> str:
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    return render_chat(tokenizer, messages, ChatOptions(**options))


def read_back(template: str, text: str) -> tuple[str, list[Any]]:
    """Content and calls that the parser which the template chooses reads, letter by letter."""
    parsers = AnswerParsers(template, "auto", "none", {}, {})
    assert parsers.tool_call_parser is not None
    tools = {tool["function"]["name"]: tool["function"]["parameters"] for tool in TOOLS}
    parser = parsers.tool_call_parser({n: Tool(n, p) for n, p in tools.items()})
    deltas = [delta for letter in text for delta in parser.feed(letter)] + parser.finish()
    calls: list[list[str]] = []
    for call in (call for delta in deltas for call in delta.tool_calls):
        if call.name is not None:
            calls.append([call.name, ""])
        calls[call.index][1] += call.arguments
    assert parser.num_complete == len(calls)
    content = "".join(delta.content for delta in deltas)
    return content, [(name, json.loads(arguments)) for name, arguments in calls]


@pytest.mark.parametrize("name", TEMPLATES)
@pytest.mark.parametrize("content", [None, "I look."])
def test_what_a_template_writes_of_calls_its_parser_reads(name: str, content: str | None) -> None:
    template = TEMPLATES[name]
    batches = [[one] for one in ARGUMENTS] if name == "llama3_json" else [ARGUMENTS]
    for batch in batches:
        before = render(template, conversation([])[:1], add_generation_prompt=False)
        whole = render(template, conversation(batch, content), add_generation_prompt=False)
        assert whole.startswith(before)
        ends = ("<|im_end|>", "<|eot_id|>", "</s>", "<｜end▁of▁sentence｜>")
        starts = ("<|im_start|>assistant\n", "<|end_header_id|>\n\n", "</think>", "<｜Assistant｜>")
        written = whole[len(before) :]
        for start in starts:
            written = written.rpartition(start)[2] if start in written else written
            if name == "deepseek_v3" and content is not None:
                written = whole[len(before) :].removeprefix("<｜Assistant｜>")
        end = min(at for mark in ends if (at := written.find(mark)) >= 0)
        found, calls = read_back(template, written[:end])
        assert calls == [("add", one) for one in batch]
        if name in ("hermes", "qwen3_coder", "deepseek_v31"):
            assert found == (content or "")


def test_each_template_chooses_its_parser() -> None:
    for name, template in TEMPLATES.items():
        chosen = AnswerParsers(template, "auto", "auto", {}, {}).tool_call_parser
        assert chosen is TOOL_CALL_PARSERS[name.partition(",")[0]]


@pytest.mark.parametrize("template", [QWEN3, QWEN_CODER, LLAMA3, MISTRAL, MISTRAL_NAMED])
def test_tools_and_calls_are_rendered_as_by_transformers(template: str) -> None:
    messages = [
        *conversation(ARGUMENTS[:1], "I look."),
        {"role": "tool", "tool_call_id": "abcdefgh0", "content": "3"},
        {"role": "assistant", "content": "Three."},
        {"role": "user", "content": "More"},
    ]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    objects = json.loads(json.dumps(messages))
    for call in objects[1]["tool_calls"]:
        call["function"]["arguments"] = json.loads(call["function"]["arguments"])
    expected = tokenizer.apply_chat_template(
        objects, tools=TOOLS, add_generation_prompt=True, tokenize=False
    )
    assert '"get_weather"' in expected or "'get_weather'" in expected
    assert render(template, messages, tools=TOOLS) == expected


def test_a_template_that_joins_arguments_to_text_gets_them_as_text() -> None:
    given = '{"a":1,  "b": "x"}'
    messages = conversation([{}, {}])
    for call in messages[1]["tool_calls"]:
        call["function"]["arguments"] = given
    messages[1]["tool_calls"][1]["function"]["arguments"] = {"c": "é"}
    text = render(DEEPSEEK_V31, messages)
    assert f"add<｜tool▁sep｜>{given}<｜tool▁call▁end｜>" in text
    assert 'add<｜tool▁sep｜>{"c": "é"}<｜tool▁call▁end｜>' in text
    # Another failure is that of the template.
    with pytest.raises(RequestError, match="the chat template fails on the messages: Zero"):
        render("{{ 1 / 0 }}", messages)


def test_a_call_without_text_has_no_content_where_the_template_asks() -> None:
    text = render(DEEPSEEK_R1, conversation([{}]), add_generation_prompt=False)
    assert text.count("<｜Assistant｜>") == 1
    assert render("{{ messages[1].content is string }}", conversation([{}])) == "True"
    template = "{{ messages[1].content }}{% if messages[1].reasoning_content is none %}{% endif %}"
    assert render(template, conversation([{}])) == ""


@pytest.mark.parametrize("nothing", [[], None])
def test_no_calls_are_no_key(nothing: object) -> None:
    answer = {"role": "assistant", "content": "b", "tool_calls": nothing}
    assert "b<|eot_id|>" in render(LLAMA3, [{"role": "user", "content": "a"}, answer])


@pytest.mark.parametrize("wrong", ["{", "[1]", "null", "a", '{"a": 1} 2', 5, [1]])
def test_arguments_that_are_no_object_are_refused(wrong: object) -> None:
    messages = conversation([{}])
    messages[1]["tool_calls"][0]["function"]["arguments"] = wrong
    with pytest.raises(RequestError, match=r"an object, or its JSON; found .* \(function 'add'\)"):
        render(QWEN3, messages)


def test_developer_is_system_to_templates_that_do_not_know_it() -> None:
    messages = [{"role": "developer", "content": "a"}, {"role": "user", "content": "b"}]
    assert render("{% for m in messages %}{{ m.role }} {% endfor %}", messages) == "system user "
    assert render("{{ messages[0].role == 'developer' }}", messages) == "True"


# ---- going on with a message ----

TRIMMED = "{% for m in messages %}<{{ m.role }}>{{ m.content | trim }}<end>\n{% endfor %}"
CONTINUED = ["The answer", "e", "end", "The answer is ", "  two\n\n", "<end>", "user", ""]


@pytest.mark.parametrize("template", [QWEN3, LLAMA3, MISTRAL, DEEPSEEK_R1, TRIMMED])
@pytest.mark.parametrize("content", CONTINUED)
def test_a_final_message_is_continued_as_by_transformers(template: str, content: str) -> None:
    messages = [{"role": "user", "content": "end"}, {"role": "assistant", "content": content}]
    tokenizer = make_tokenizer()
    tokenizer.chat_template = template
    expected = tokenizer.apply_chat_template(messages, continue_final_message=True, tokenize=False)
    text = render(template, messages, add_generation_prompt=False, continue_final_message=True)
    assert text == expected
    assert text.rstrip().endswith(content.strip())


def test_a_message_that_cannot_be_continued() -> None:
    messages = [{"role": "assistant", "content": "a"}]
    with pytest.raises(RequestError, match="add_generation_prompt false"):
        render(TRIMMED, messages, continue_final_message=True)
    with pytest.raises(RequestError, match="does not write the last message's content"):
        render("a", messages, add_generation_prompt=False, continue_final_message=True)
