"""The chat page in a real browser, over an API that plays what the tests want."""

import asyncio
import json
import threading
import time
from collections.abc import AsyncIterator, Callable, Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest
import uvicorn
from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response, StreamingResponse

from srt.serve import page_routes
from srt.test.browser import browser, requested_urls
from srt.test.ci_register import register_cpu_ci

register_cpu_ci(est_time=60, suite="per-commit")

KEY = "secret"


@dataclass
class PlayedServer:
    """An API that answers with what the test has put there.

    Attributes:
        answers: Texts to stream, each in pieces, one a request; the last one again and again.
        pause: Seconds between pieces.
        key: What clients must give, or nothing.
        refusal: A status, its headers and a message instead of an answer.
        requests: Bodies that came.
        aborted: Streams that the client left.
    """

    url: str = ""
    answers: list[list[str]] = field(default_factory=lambda: [["Hello."]])
    pause: float = 0.0
    key: str = ""
    refusal: tuple[int, dict[str, str], str] | None = None
    requests: list[dict[str, Any]] = field(default_factory=list)
    aborted: int = 0

    def app(self) -> FastAPI:
        app = FastAPI()
        app.include_router(page_routes.make_router())

        @app.get("/version")
        async def version(request: Request) -> JSONResponse:
            if self._is_refused(request):
                return _error(401, {}, "expected an API key, found none")
            facts = {"model": "Tiny-FP8", "dtype": "float16", "tier": "avx2", "threads": 2}
            return JSONResponse(facts | {"context_length": 8192, "kv_tokens": 4096})

        @app.post("/v1/chat/completions")
        async def chat(request: Request) -> Response:
            if self._is_refused(request):
                return _error(401, {}, "expected an API key, found none")
            self.requests.append(await request.json())
            if self.refusal is not None:
                return _error(*self.refusal)
            pieces = self.answers.pop(0) if len(self.answers) > 1 else self.answers[0]
            return StreamingResponse(self._stream(pieces), media_type="text/event-stream")

        return app

    def _is_refused(self, request: Request) -> bool:
        return bool(self.key) and request.headers.get("authorization") != f"Bearer {self.key}"

    async def _stream(self, pieces: list[str]) -> AsyncIterator[bytes]:
        try:
            for piece in pieces:
                yield _event({"choices": [{"index": 0, "delta": {"content": piece}}]})
                if self.pause:
                    await asyncio.sleep(self.pause)
            end = {"index": 0, "delta": {}, "finish_reason": "stop"}
            yield _event({"choices": [end]})
            usage = {"prompt_tokens": 9, "completion_tokens": len(pieces)}
            yield _event({"choices": [], "usage": usage})
            yield b"data: [DONE]\n\n"
        except (asyncio.CancelledError, GeneratorExit):
            self.aborted += 1
            raise


def _event(value: dict[str, Any]) -> bytes:
    return b"data: " + json.dumps(value).encode() + b"\n\n"


def _error(status: int, headers: dict[str, str], message: str) -> JSONResponse:
    return JSONResponse({"error": {"message": message}}, status, headers)


@pytest.fixture(scope="module")
def window() -> Iterator[Any]:
    with browser() as window:
        yield window


@pytest.fixture
def server(window: Any) -> Iterator[PlayedServer]:
    played = PlayedServer()
    config = uvicorn.Config(played.app(), port=0, log_level="error", lifespan="off")
    running = uvicorn.Server(config)
    thread = threading.Thread(target=running.run, daemon=True)
    thread.start()
    until(lambda: running.started)
    port = running.servers[0].sockets[0].getsockname()[1]
    played.url = f"http://127.0.0.1:{port}"
    yield played
    window.get("about:blank")
    running.should_exit = True
    thread.join(10)


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it has not come to that"
        time.sleep(0.02)
    return found


class Page:
    """The page, as a reader sees and uses it."""

    def __init__(self, window: Any, url: str) -> None:
        self.window = window
        window.get(url)
        window.execute_script("localStorage.clear(); sessionStorage.clear();")
        requested_urls(window)
        window.get(url)
        until(lambda: self.text("#machine"))

    def find(self, selector: str) -> Any:
        return self.window.find_element("css selector", selector)

    def all(self, selector: str) -> list[Any]:
        return list(self.window.find_elements("css selector", selector))

    def click(self, selector: str) -> None:
        """Clicks the last element that is selected."""
        script = "[...document.querySelectorAll(arguments[0])].at(-1).click()"
        self.window.execute_script(script, selector)

    def text(self, selector: str) -> str:
        script = "return document.querySelector(arguments[0])?.textContent ?? ''"
        return str(self.window.execute_script(script, selector))

    def press(self, *keys: str) -> None:
        from selenium.webdriver.common.action_chains import ActionChains

        ActionChains(self.window).send_keys(*keys).perform()

    def break_line(self) -> None:
        from selenium.webdriver.common.action_chains import ActionChains
        from selenium.webdriver.common.keys import Keys

        keys = ActionChains(self.window).key_down(Keys.SHIFT).send_keys(Keys.ENTER)
        keys.key_up(Keys.SHIFT).perform()

    def ask(self, text: str, *, wait: bool = True) -> None:
        answers = len(self.all(".message.assistant"))
        self.find("#input").send_keys(text, "\n")
        until(lambda: len(self.all(".message.assistant")) > answers or self.is_running)
        if wait:
            until(lambda: not self.is_running)

    @property
    def is_running(self) -> bool:
        return bool(self.window.execute_script("return !document.getElementById('stop').hidden"))

    def answer(self) -> str:
        # In one call: the node is replaced when its answer ends.
        script = (
            "return [...document.querySelectorAll('.message.assistant .body')].at(-1)?.innerText"
        )
        return str(self.window.execute_script(script) or "").strip()

    def problems(self) -> list[str]:
        entries = self.window.get_log("browser")
        return [entry["message"] for entry in entries if entry["level"] != "DEBUG"]


@pytest.fixture
def page(window: Any, server: PlayedServer) -> Page:
    window.set_window_size(1100, 800)
    return Page(window, server.url)


def test_an_answer_comes_piece_by_piece_with_its_figures(page: Page, server: PlayedServer) -> None:
    server.answers = [["One ", "two ", "**three**", "."]]
    server.pause = 0.1
    page.ask("count", wait=False)
    until(lambda: page.answer().startswith("One"))
    assert page.is_running
    until(lambda: not page.is_running)
    assert page.answer() == "One two three."
    assert page.text(".message.assistant strong") == "three"
    assert "4 tokens" in page.text(".message.assistant .stats")
    assert "tokens/s" in page.text(".message.assistant .stats")
    assert page.text("#model") == "Tiny-FP8"
    assert page.text("#machine") == "float16 · avx2 · 2 threads · 8,192 context"
    assert server.requests[0]["messages"] == [{"role": "user", "content": "count"}]
    assert page.problems() == []
    assert all(url.startswith(server.url) for url in requested_urls(page.window))


def test_stop_ends_the_request_and_keeps_what_came(page: Page, server: PlayedServer) -> None:
    server.answers = [["word "] * 500]
    server.pause = 0.05
    page.ask("go", wait=False)
    until(lambda: page.answer().startswith("word word"))
    page.find("#stop").click()
    until(lambda: server.aborted == 1)
    until(lambda: not page.is_running)
    assert page.answer().startswith("word word")
    assert "stopped" in page.text(".message.assistant .stats")


def test_edit_and_retry_go_on_from_there(page: Page, server: PlayedServer) -> None:
    server.answers = [["first"], ["second"], ["third"], ["fourth"]]
    page.ask("one")
    page.ask("two")
    page.click("[data-action=retry]")
    until(lambda: page.answer() == "third")
    assert [m["content"] for m in server.requests[-1]["messages"]] == ["one", "first", "two"]
    page.window.execute_script("document.querySelector('[data-action=edit]').click()")
    page.find("textarea.edit").send_keys(" more\n")
    until(lambda: page.answer() == "fourth")
    assert server.requests[-1]["messages"] == [{"role": "user", "content": "one more"}]
    assert len(page.all(".message")) == 2


def test_it_can_be_used_by_keyboard_alone(page: Page, server: PlayedServer) -> None:
    from selenium.webdriver.common.keys import Keys

    server.answers = [["ok"]]
    page.window.execute_script("document.activeElement.blur()")
    page.press("/")
    page.press("a line")
    page.break_line()
    page.press("another", Keys.ENTER)
    until(lambda: server.requests and not page.is_running)
    assert server.requests[0]["messages"][0]["content"] == "a line\nanother"
    page.press(Keys.ARROW_UP)
    until(lambda: page.all("textarea.edit"))
    page.press("!", Keys.ENTER)
    until(lambda: len(server.requests) == 2 and not page.is_running)
    assert server.requests[1]["messages"][0]["content"] == "a line\nanother!"
    server.answers, server.pause = [["word "] * 500], 0.05
    page.ask("go", wait=False)
    until(lambda: page.answer().startswith("word"))
    page.press(Keys.ESCAPE)
    until(lambda: not page.is_running)


HOSTILE = [
    "<script>window.hacked = 1</script>",
    "<img src=x onerror='window.hacked = 1'>",
    "![x](javascript:window.hacked=1) [y](javascript:window.hacked=1)",
    "[z](data:text/html,<script>window.hacked=1</script>)",
    '[a](https://example.com/"onmouseover="window.hacked=1) <https://example.com/x>',
    "![pixel](https://example.com/pixel.png)",
    "```html\n<script>window.hacked = 1</script>\n<img src=x onerror=alert(1)>",
    "<iframe src='https://example.com'></iframe><svg onload='window.hacked=1'>",
    "<a href='javascript:window.hacked=1'>x</a><style>body{display:none}</style>",
    "\u202egnirts\u202c \x00\x07 &lt;script&gt; &#60;script&#62;",
    "\n".join("  " * i + "- x" for i in range(1000)),
    "*a [b](`c " * 10_000,
    "\n".join(["word " * 200] * 100),
    "> " * 500 + "deep",
    "*" * 3000 + "a" + "_" * 3000 + "`" * 999 + "[" * 2000,
    "| a | b |\n|---|---|\n| <script>window.hacked=1</script> | `<b>` |",
]


def test_nothing_that_a_model_writes_runs_or_is_fetched(page: Page, server: PlayedServer) -> None:
    server.answers = [[text[i : i + 40] for i in range(0, len(text), 40)] for text in HOSTILE]
    assert max(map(len, HOSTILE)) >= 100_000
    server.answers.append(["end"])
    for _ in HOSTILE:
        page.ask("x")
        assert not page.window.execute_script("return window.hacked")
    found = page.window.execute_script(
        "return [...document.querySelectorAll('#log *')].flatMap((one) => ["
        "  ...(/^(SCRIPT|IMG|IFRAME|SVG|STYLE|OBJECT|EMBED|LINK)$/i.test(one.nodeName)"
        "     ? [one.nodeName] : []),"
        "  ...[...one.attributes].filter((a) => /^on/i.test(a.name)"
        "     || (/^(href|src)$/i.test(a.name) && !/^https?:/i.test(a.value))).map((a) => a.name)])"
    )
    assert found == []
    links = page.window.execute_script(
        "return [...document.querySelectorAll('#log a')].map((a) => [a.href, a.rel])"
    )
    assert links
    assert all(href.startswith("https://example.com/") for href, _ in links)
    assert all("noopener" in rel and "noreferrer" in rel for _, rel in links)
    assert "<script>window.hacked = 1</script>" in page.text("#log")
    # What would turn the direction of the text around it, or hide, is shown.
    assert "[U+202E]gnirts[U+202C] \u2400\u2407" in page.text("#log")
    assert page.problems() == []
    assert all(url.startswith(server.url) for url in requested_urls(page.window))


def test_events_are_read_wherever_they_are_cut(page: Page) -> None:
    text = "\ufeff: hello\r\ndata: {\r\ndata:1}\r\n\r\nevent: x\rdata: é\r\rdata: last\n\nid: 1\n\n"
    script = """
        const [text, done] = arguments;
        import('/api.js').then(({ EventReader }) => {
          const all = new Set();
          for (let i = 0; i <= text.length; i++) for (let j = i; j <= text.length; j++) {
            const reader = new EventReader();
            const parts = [text.slice(0, i), text.slice(i, j), text.slice(j)];
            all.add(JSON.stringify(parts.flatMap((part) => reader.push(part))));
          }
          done([...all]);
        });"""
    found = page.window.execute_async_script(script, text)
    assert [json.loads(one) for one in found] == [["{\n1}", "é", "last"]]


STREAMED = (
    "# T\n\nOne *two*\nthree.\n## U\n- a\n\n- b\n  ```py\n  x = 1\n\n  y\n  ```\n- c\n\n1. d\n\n"
    "End\n"
    "```js\nlet x = 1;\n\n``\n- no item\n```\nafter\n\n> q\n> r\n\n"
    "| a | b |\n|---|---|\n| 1 | 2 |\n"
    "\n~~~\nnever closed\n"
)


def test_a_stream_looks_as_the_whole(page: Page) -> None:
    """Whatever was rendered on the way, wherever the text was cut."""
    script = """
        const [text, done] = arguments;
        Promise.all([import('/stream.js'), import('/markdown.js')]).then(([stream, markdown]) => {
          const whole = document.createElement('div');
          whole.append(...markdown.renderMarkdown(text));
          const wrong = [];
          for (let size = 1; size <= text.length; size++) {
            const root = document.createElement('div');
            const view = new stream.StreamView(root);
            for (let at = 0; at < text.length; at += size) {
              view.pending += text.slice(at, at + size);
              view.render(false);
            }
            view.finish();
            const same = root.innerHTML === whole.innerHTML;
            if (!same) wrong.push([size, root.innerHTML, whole.innerHTML]);
          }
          done([wrong.slice(0, 1), whole.textContent]);
        });"""
    wrong, shown = page.window.execute_async_script(script, STREAMED)
    assert wrong == []
    assert "never closed" in shown


def test_a_long_answer_stays_smooth(page: Page, server: PlayedServer) -> None:
    """Rendering is counted, not timed: a paragraph that is complete is rendered once more at
    most, when the answer has ended.
    """
    page.window.execute_script(
        "window.made = 0; const make = document.createElement.bind(document);"
        "document.createElement = (name) => { window.made += 1; return make(name); };"
    )
    paragraphs = 1500
    server.answers = [["A paragraph with **some** words.\n\n"] * paragraphs]
    page.ask("long")
    assert len(page.all(".message.assistant .body p")) == paragraphs
    made = page.window.execute_script("return window.made")
    assert made < 4 * paragraphs  # p and strong, and the last ones of each frame


@pytest.mark.parametrize(
    ("status", "headers", "message"),
    [
        (429, {}, "the queue is full"),
        (503, {"Retry-After": "3600"}, "the engine is restarting"),
        (400, {}, "a prompt of 9000 tokens"),
    ],
)
def test_the_servers_own_words_are_shown_and_retry_works(
    page: Page,
    server: PlayedServer,
    status: int,
    headers: dict[str, str],
    message: str,
) -> None:
    server.refusal = (status, headers, message)
    page.ask("x")
    assert page.text(".message.assistant .error") == message
    server.refusal = None
    page.click("[data-action=retry]")
    until(lambda: page.answer() == "Hello.")
    assert not page.all(".message .error")


def test_a_busy_server_is_asked_again_when_it_says(page: Page, server: PlayedServer) -> None:
    server.refusal = (503, {"Retry-After": "1"}, "the engine is restarting")
    page.ask("x", wait=False)
    until(lambda: "Trying again in 1 s." in page.text(".message.assistant .note"))
    assert page.is_running
    server.refusal = None
    until(lambda: page.answer() == "Hello." and not page.is_running)
    server.refusal = (429, {"Retry-After": "30"}, "the queue is full")
    page.ask("y", wait=False)
    until(lambda: "the queue is full" in page.all(".message.assistant .note")[-1].text)
    page.find("#stop").click()
    until(lambda: not page.is_running)


def test_a_key_is_asked_for_and_goes_with_the_tab(window: Any, server: PlayedServer) -> None:
    server.key = KEY
    page = Page(window, server.url)
    until(lambda: page.find("#key").is_displayed())
    assert page.text("#key-message") == "expected an API key, found none"
    page.find("#key").send_keys(KEY, "\n")
    until(lambda: "Tiny-FP8" in page.text("#facts"))
    page.ask("x")
    assert page.answer() == "Hello."
    kept = window.execute_script("return JSON.stringify(localStorage)")
    assert KEY not in kept


def test_conversations_and_settings_survive_a_reload(
    window: Any, page: Page, server: PlayedServer
) -> None:
    page.find("#settings-button").click()
    page.find("#set-system").send_keys("Be kind.")
    page.find("#set-temperature").send_keys("0.5\t")
    page.find("#close-settings").click()
    page.ask("remember me")
    assert server.requests[0]["messages"][0] == {"role": "system", "content": "Be kind."}
    assert server.requests[0]["temperature"] == 0.5
    window.get(server.url)
    until(lambda: page.all("#chats .open"))
    next(one for one in page.all("#chats .open") if one.text == "remember me").click()
    until(lambda: page.answer() == "Hello.")
    page.find("#chats [aria-label='Delete remember me']").click()
    window.switch_to.alert.accept()
    until(lambda: "remember me" not in page.text("#chats"))


@pytest.mark.parametrize("width", [360, 1100])
def test_it_fits_the_screen_light_and_dark(page: Page, server: PlayedServer, width: int) -> None:
    page.window.set_window_size(width, 740)
    server.answers = [["# Title\n\n" + "x" * 300 + "\n\n```python\n" + "y" * 300 + "\n```\n"]]
    page.ask("x")
    wide = "return document.documentElement.scrollWidth - document.documentElement.clientWidth"
    assert page.window.execute_script(wide) == 0
    colours = []
    for _ in range(2):
        page.find("#theme").click()
        colours.append(
            page.window.execute_script("return getComputedStyle(document.body).backgroundColor")
        )
    assert len(set(colours)) == 2
    if width < 700:
        page.find("#menu").click()
        until(lambda: page.find("#new-chat").is_displayed())


MARKDOWN = {
    "a *b* **c** ~~d~~ `e*f*`": "<p>a <em>b</em> <strong>c</strong> <del>d</del> "
    "<code>e*f*</code></p>",
    "snake_case_name 2*3*4": "<p>snake_case_name 2*3*4</p>",
    "# H\ntext": "<h2>H</h2><p>text</p>",
    "- a\n- b\n  - c\n\n1. d\n2. e": "<ul><li>a</li><li>b<ul><li>c</li></ul></li></ul>"
    "<ol><li>d</li><li>e</li></ol>",
    "> q\n> r": "<blockquote><p>q\nr</p></blockquote>",
    "---": "<hr>",
    "a\\*b\\*": "<p>a*b*</p>",
    "| a | b |\n|--|--|\n| 1 | 2 |": "<div><table><thead><tr><th>a</th><th>b</th></tr></thead>"
    "<tbody>"
    "<tr><td>1</td><td>2</td></tr></tbody></table></div>",
    "<b>&amp;": "<p>&lt;b&gt;&amp;amp;</p>",
    "3. c\n4. d": "<ol><li>c</li><li>d</li></ol>",
}


@pytest.mark.parametrize("text", MARKDOWN)
def test_markdown(page: Page, text: str) -> None:
    script = (
        "const done = arguments[1]; import('/markdown.js').then(({ renderMarkdown }) => {"
        " const root = document.createElement('div'); root.append(...renderMarkdown(arguments[0]));"
        " for (const one of root.querySelectorAll('*'))"
        " for (const name of ['class', 'dir', 'tabindex'])"
        " one.removeAttribute(name);"
        " for (const one of root.querySelectorAll('[start]')) one.removeAttribute('start');"
        " done(root.innerHTML); });"
    )
    assert page.window.execute_async_script(script, text) == MARKDOWN[text]
