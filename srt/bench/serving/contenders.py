"""What is measured, and servers that speak OpenAI's API."""

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from srt.bench.serving.dataset import BenchRequest
from srt.bench.serving.http_client import HttpClient
from srt.bench.serving.load import Load, run_load
from srt.bench.serving.timings import Timing, read_answer
from srt.errors import RequestError, SrtError

Progress = Callable[[], None]


class Contender(ABC):
    """Something that answers requests.

    Attributes:
        name: What the table calls it.
    """

    name: str

    @abstractmethod
    def run(
        self, load: Load, requests: Sequence[BenchRequest], seed: str, progress: Progress
    ) -> list[Timing]:
        """Sends requests as `load` says; `progress` is called for each that has ended."""


class HttpServer(Contender):
    """A server.

    Args:
        name: What the table calls it.
        url: With or without `/v1` at its end.
        model: Its name in requests; None asks the server.
        key: For it, or None.
        endpoint: `completions` or `chat`.
        body: Further fields of each request.
        timeout: Seconds for an answer.

    Raises:
        SrtError: It cannot be reached, or does not say which models it has.
    """

    def __init__(
        self,
        name: str,
        url: str,
        *,
        model: str | None,
        key: str | None,
        endpoint: str,
        body: Mapping[str, Any],
        timeout: float,
    ) -> None:
        self.name = name
        self._url = url.rstrip("/").removesuffix("/v1")
        if not self._url.startswith(("http://", "https://")):
            raise RequestError(f"{url}: expected a URL that begins with http:// or https://")
        self._headers = {} if key is None else {"Authorization": f"Bearer {key}"}
        self._endpoint, self._body, self._timeout = endpoint, dict(body), timeout
        self.model = model or asyncio.run(self._ask_model())

    def _client(self) -> HttpClient:
        return HttpClient(self._url, self._headers, self._timeout)

    async def _ask_model(self) -> str:
        client = self._client()
        answer = await client.get("/v1/models")
        client.close()
        try:
            return str(json.loads(answer.body)["data"][0]["id"])
        except (ValueError, LookupError, TypeError):
            found = answer.problem or f"status {answer.status}"
            raise SrtError(f"{self.name} at {self._url} does not say its model ({found})") from None

    def encode(self, request: BenchRequest) -> tuple[str, bytes]:
        """The path and the body of a request."""
        prompt, is_chat = request.prompt, self._endpoint == "chat"
        holds_messages = isinstance(prompt, list) and isinstance(prompt[0], dict)
        if is_chat and isinstance(prompt, str):
            prompt, holds_messages = [{"role": "user", "content": prompt}], True
        if is_chat != holds_messages:
            raise RequestError(
                "--endpoint chat: expected prompts of text or messages, found token ids"
                if is_chat
                else "--endpoint completions: expected prompts of text or ids, found messages"
            )
        body: dict[str, Any] = {
            "model": self.model,
            "messages" if is_chat else "prompt": prompt,
            "max_tokens": request.output_len,
            "temperature": 0,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if request.exact:
            body["ignore_eos"] = True
        path = "/v1/chat/completions" if is_chat else "/v1/completions"
        return path, json.dumps(body | self._body).encode()

    def run(
        self, load: Load, requests: Sequence[BenchRequest], seed: str, progress: Progress
    ) -> list[Timing]:
        # Written before anything is timed.
        encoded = [(request, *self.encode(request)) for request in requests]

        async def run() -> list[Timing]:
            client = self._client()

            async def send(item: tuple[BenchRequest, str, bytes]) -> Timing:
                request, path, body = item
                timing = read_answer(await client.post(path, body), request)
                progress()
                return timing

            try:
                return await run_load(load, encoded, send, seed)
            finally:
                client.close()

        return asyncio.run(run())
