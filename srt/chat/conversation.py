"""The conversation of `srt chat`: its messages, and the commands on it."""

import json
import re
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from srt.errors import RequestError

if TYPE_CHECKING:
    from srt.entrypoints.engine import Engine
    from srt.entrypoints.outputs import GenerateOutput
    from srt.sampling.sampling_params import SamplingParams

COMMANDS = {
    "/help": "shows this",
    "/system": "[TEXT] shows or sets the system message",
    "/reset": "begins a new conversation",
    "/save": "FILE writes the conversation to a new file, as JSON",
    "/stats": "shows speed, cache and context of the last answer",
    "/exit": "ends",
}
# Only a line that begins like a command is one: `/usr/bin/env` and `/ 2` are messages.
_COMMAND = re.compile(r"(/[A-Za-z]+)(?:[ \t]+(.*))?")


def parse_command(text: str) -> tuple[str, str] | None:
    """Command word and argument; None for a message.

    A command is a single line whose first word is `/` and letters; `//` at the beginning of a
    message stands for `/`.
    """
    match = _COMMAND.fullmatch(text)
    return None if match is None else (match[1], (match[2] or "").strip())


def unescape(text: str) -> str:
    """A message as it is meant: `//etc` is `/etc`."""
    return text[1:] if text.startswith("//") else text


@dataclass
class Conversation:
    """Messages so far, each answered.

    Attributes:
        engine: What answers.
        params: How.
        template_kwargs: Variables of the chat template.
        system: The system message, or None.
        turns: The messages after it.
        last: What the last complete answer took.
    """

    engine: "Engine"
    params: "SamplingParams"
    template_kwargs: dict[str, Any] | None
    system: str | None
    turns: list[dict[str, str]] = field(default_factory=list)
    last: "GenerateOutput | None" = None

    @property
    def messages(self) -> list[dict[str, str]]:
        """All messages, as the chat template gets them."""
        system = [] if self.system is None else [{"role": "system", "content": self.system}]
        return [*system, *self.turns]

    def answer(self, text: str) -> Generator[str, None, None]:
        """The answer to a message, in pieces as they come. The message and what has come of the
        answer join the conversation when the iterator ends or is closed; neither does if it fails.

        Raises:
            RequestError: The conversation has outgrown the context, or the like.
            SrtError: The answer failed.
        """
        message = {"role": "user", "content": text}
        chunks = self.engine.generate(
            messages=[*self.messages, message],
            sampling_params=self.params,
            chat_template_kwargs=self.template_kwargs,
            stream=True,
        )
        pieces: list[str] = []
        try:
            for chunk in chunks:
                if chunk.output is not None:
                    self.last = chunk.output
                pieces.append(chunk.text)
                yield chunk.text
        except (GeneratorExit, KeyboardInterrupt):
            self._add(message, pieces)
            raise
        finally:
            chunks.close()
        self._add(message, pieces)

    def _add(self, message: dict[str, str], pieces: Sequence[str]) -> None:
        self.turns += [message, {"role": "assistant", "content": "".join(pieces)}]

    def save(self, name: str) -> None:
        """Writes `{"messages": [...]}` to a new file; `~` is the home directory.

        Raises:
            RequestError: The file exists or cannot be written.
        """
        content = json.dumps({"messages": self.messages}, indent=2)
        file = Path(name)
        try:
            file = file.expanduser()
            with file.open("x", encoding="utf-8") as stream:
                try:
                    stream.write(content + "\n")
                    stream.flush()
                except BaseException:
                    file.unlink()
                    raise
        except FileExistsError:
            raise RequestError(f"{file} exists already; nothing was written") from None
        except OSError as error:
            raise RequestError(f"cannot write {file}: {error.strerror}") from error
        except (RuntimeError, ValueError) as error:  # no such user's home; a NUL in the name
            raise RequestError(f"cannot write {file}: {error}") from error

    def stats(self) -> str:
        """Speed and size of the last answer, and what the cache holds, in a line or two."""
        runner = self.engine.model_runner
        used = runner.allocator.size - runner.allocator.available_size
        cache = f"cache: {used} of {runner.allocator.size} tokens"
        if self.last is None:
            return f"no answer yet; {cache}"
        last = self.last
        rates = [
            f"{name} {rate:.1f} tokens/s"
            for name, rate in (
                ("prefill", last.prefill_tokens_per_second),
                ("decode", last.decode_tokens_per_second),
            )
            if rate is not None
        ]
        context = last.prompt_tokens + last.completion_tokens
        limit = self.engine.model_config.context_length
        return (
            f"{', '.join(rates)}; {last.prompt_tokens} prompt tokens ({last.cached_tokens} from "
            f"the cache), {last.completion_tokens} new\n"
            f"context: {context} of {limit} tokens; {cache}"
        )
