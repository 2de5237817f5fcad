"""Output that follows a JSON schema, a regular expression or a grammar.

llguidance keeps a parser for each request and says which tokens may come next. What it says is a
function of the tokens generated so far: a state that is ahead, since a pass was interrupted after
its token was chosen, is rolled back, and one that is behind catches up.

The tokens that may follow are computed in a thread of their own while the model computes the logits
among which they select; llguidance lets go of Python's lock meanwhile. Another thread makes the
parsers, which may take a second: a request waits for its own, and nobody for another's. Parsers
share nothing, so that whether one's work is too much depends on its own output only.
"""

import json
import os
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from srt.errors import RequestError
from srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled sources that are known to be right, the last ones; each takes its own length.
_KNOWN_SOURCES = 64
# Work that a parser may do for one token, by its own count. All other requests wait for it: at most
# some tens of milliseconds. A schema of 400 optional fields stays below.
_STEP_FUEL = 200_000
_STEP_ITEMS = 2_500
_LONGEST_PROBLEM = 1000
# Parsers are made with what the model's threads leave.
_COMPILER_NICENESS = 4

TokenMask = NDArray[np.bool_]


class GrammarCompiler:
    """Makes the grammars of requests, for one tokenizer.

    Args:
        tokenizer: A transformers tokenizer.
        vocab_size: The length of a row of logits.
        end_token_ids: Tokens that may end an output that is complete.
    """

    def __init__(self, tokenizer: Any, vocab_size: int, end_token_ids: Iterable[int]) -> None:
        self._tokenizer = tokenizer
        self._vocab_size = vocab_size
        self._ends = sorted(token for token in end_token_ids if token < vocab_size)
        self._lock = threading.Lock()
        self._known: OrderedDict[tuple[str, str], None] = OrderedDict()
        self._vocabulary_lock = threading.Lock()
        self._vocabulary: LLTokenizer | None = None
        self._threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor] | None = None

    def check(self, params: SamplingParams) -> None:
        """Whether the grammar of a request can be compiled, if it has one. That takes from a
        millisecond to some seconds; any thread may call it.

        Raises:
            RequestError: It cannot; the message says where and why.
        """
        source = _source(params)
        if source is None:
            return
        self._check_request(source[0], params)
        with self._lock:
            if source in self._known:
                self._known.move_to_end(source)
                return
        self.compile(source)
        with self._lock:
            self._known[source] = None
            while len(self._known) > _KNOWN_SOURCES:
                self._known.popitem(last=False)

    def make(self, params: SamplingParams) -> "Grammar | None":
        """The grammar of a request at its beginning; None if it has none. It is compiled in a
        thread; :meth:`check` says beforehand whether that will succeed.

        Raises:
            RequestError: It does not go with the request's other parameters.
        """
        source = _source(params)
        if source is None:
            return None
        self._check_request(source[0], params)
        with self._lock:
            if self._threads is None:
                self._threads = (
                    ThreadPoolExecutor(1, "srt-grammar-compiler", initializer=_yield_to_others),
                    ThreadPoolExecutor(1, "srt-grammar"),
                )
        return Grammar(self, source, self._threads, params.reasoning_tokens or ())

    def compile(self, source: tuple[str, str]) -> "tuple[LLMatcher, TokenMask]":
        """A parser at its beginning, and the tokens that may come first.

        Args:
            source: The parameter's name and what it says.

        Raises:
            RequestError: It cannot be compiled.
        """
        from llguidance import LLMatcher

        name, text = source
        grammar = _as_llguidance(name, text)
        # The vocabulary matters: a grammar may name special tokens.
        matcher = LLMatcher(self._get_vocabulary(), grammar, log_level=0, limits=_make_limits())
        content = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            raise RequestError(f"{name} cannot be used: {_in_a_line(matcher.get_error())}")
        return matcher, self.as_mask(content)

    def as_mask(self, content: bytes) -> TokenMask:
        """A mask of llguidance's bits."""
        bits = np.frombuffer(content, dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)

    def free_mask(self) -> TokenMask:
        """All tokens but those that end an output."""
        mask = np.ones(self._vocab_size, dtype=np.bool_)
        mask[self._ends] = False
        return mask

    def _check_request(self, name: str, params: SamplingParams) -> None:
        if params.ignore_eos:
            raise RequestError(
                f"{name} does not go with ignore_eos: an output that is complete has to end"
            )
        if not self._ends:
            raise RequestError(f"{name} needs a model with an end-of-sequence token")

    def _get_vocabulary(self) -> "LLTokenizer":
        """Takes half a second to make."""
        with self._vocabulary_lock:
            if self._vocabulary is None:
                from llguidance.hf import from_tokenizer

                try:
                    self._vocabulary = from_tokenizer(
                        self._tokenizer, n_vocab=self._vocab_size, eos_token=self._ends
                    )
                except Exception as error:
                    raise RequestError(
                        f"structured output does not work with this model's tokenizer: {error}"
                    ) from error
            return self._vocabulary


class Grammar:
    """What may follow in one request's output.

    Args:
        compiler: Makes the parser.
        source: The parameter's name and what it says.
        threads: Where the parser is made, and where it works.
        reasoning: Tokens that begin and end reasoning, or that end it (see `SamplingParams`).
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        source: tuple[str, str],
        threads: tuple[ThreadPoolExecutor, ThreadPoolExecutor],
        reasoning: Sequence[int] = (),
    ) -> None:
        self._reasoning = tuple(reasoning)
        self._compiler = compiler
        self._source = source
        compiling, self._executor = threads
        self._compiled = compiling.submit(compiler.compile, source)
        # The next two are the executor's.
        self._matcher: LLMatcher | None = None
        self._consumed: list[int] = []
        self._pending: tuple[tuple[int, ...], Future[TokenMask]] | None = None

    @property
    def is_ready(self) -> bool:
        """Whether it has been compiled, or cannot be; :meth:`mask` waits for that."""
        return self._compiled.done()

    def prepare(self, output_ids: Sequence[int]) -> None:
        """Begins to compute which tokens may follow `output_ids`."""
        key = tuple(output_ids)
        self._pending = key, self._executor.submit(self._compute, key)

    def mask(self, output_ids: Sequence[int]) -> TokenMask:
        """Which tokens may follow `output_ids`: `[vocab_size]`, true for those that may.

        Raises:
            RequestError: The output does not follow the grammar, or takes more work than a token
                may.
        """
        pending = self._pending
        if pending is None or pending[0] != tuple(output_ids):
            self.prepare(output_ids)
            pending = self._pending
            assert pending is not None
        return pending[1].result()

    def _compute(self, output_ids: tuple[int, ...]) -> TokenMask:
        start = self._start_of_structure(output_ids)
        if start is None:
            return self._compiler.free_mask()
        mask = self._structured_mask(output_ids[start:])
        if len(self._reasoning) == 2 and not output_ids:
            mask = mask.copy()
            mask[self._reasoning[0]] = True
        return mask

    def _start_of_structure(self, output_ids: tuple[int, ...]) -> int | None:
        """How many tokens are reasoning; None while more are."""
        if not self._reasoning:
            return 0
        *begin, end = self._reasoning
        if begin and output_ids[:1] != (begin[0],):
            return 0
        return output_ids.index(end) + 1 if end in output_ids else None

    def _structured_mask(self, output_ids: tuple[int, ...]) -> TokenMask:
        matcher, first = self._compiled.result()
        if not output_ids and self._matcher is None:
            return first
        if self._matcher is not None:
            matcher = self._matcher
        self._matcher = matcher
        ids = list(output_ids)
        common = _common_length(self._consumed, ids)
        behind, self._consumed = len(self._consumed) - common, ids
        if behind:
            matcher.rollback(behind)
        if ids[common:]:
            matcher.consume_tokens(ids[common:])
        content = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            problem = _in_a_line(matcher.get_error())
            raise RequestError(f"the output cannot follow its grammar any further: {problem}")
        return self._compiler.as_mask(content)


def wait_for_any(grammars: Iterable[Grammar], seconds: float) -> None:
    """Waits until one of some grammars is ready, but not for long."""
    wait([one._compiled for one in grammars], seconds, FIRST_COMPLETED)


def _common_length(one: list[int], other: list[int]) -> int:
    """How many tokens two lists begin with both."""
    if other[: len(one)] == one:  # nearly always
        return len(one)
    pairs = enumerate(zip(one, other, strict=False))
    return next((i for i, (a, b) in pairs if a != b), min(len(one), len(other)))


def _source(params: SamplingParams) -> tuple[str, str] | None:
    """The parameter that says what an output follows, and what it says."""
    for name in ("json_schema", "regex", "grammar"):
        value = getattr(params, name)
        if value is not None:
            return name, str(value)
    return None


def _as_llguidance(name: str, text: str) -> str:
    """The grammar that a parameter means, as llguidance reads it.

    Raises:
        RequestError: It cannot be read.
    """
    from llguidance import LLMatcher
    from llguidance.gbnf_to_lark import any_to_lark

    if name == "regex":
        return LLMatcher.grammar_from_regex(text)
    try:
        if name == "grammar":
            return LLMatcher.grammar_from_lark(any_to_lark(text))
        # One space after separators and no other white space: a model that begins to write some
        # could otherwise go on for ever.
        options: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        schema = json.loads(text)
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        schema.pop("x-guidance", None)
        return LLMatcher.grammar_from_json_schema(schema, overrides=options)
    except Exception as error:
        # Numbers that no float holds, for one.
        raise RequestError(f"{name} cannot be used: {_in_a_line(str(error))}") from error


def _in_a_line(problem: str) -> str:
    """What llguidance says, without its state, and without all of a long source."""
    line = " ".join(problem.partition("<state>")[0].split())
    if len(line) <= _LONGEST_PROBLEM:
        return line
    return f"{line[: _LONGEST_PROBLEM // 2]} ... {line[-_LONGEST_PROBLEM // 2 :]}"


def _make_limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(step_lexer_fuel=_STEP_FUEL, step_max_items=_STEP_ITEMS)


def _yield_to_others() -> None:
    """Lets the thread that calls this run when others do not want to."""
    os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _COMPILER_NICENESS)
