"""Output that follows a JSON schema, a regular expression or a grammar.

llguidance keeps a parser for each request and says which tokens may come next. What it says is a
function of the tokens generated so far: a state that is ahead, since a pass was interrupted after
its token was chosen, is rolled back, and one that is behind catches up.

The tokens that may follow are computed in a thread of their own while the model computes the logits
among which they select; llguidance lets go of Python's lock meanwhile.
"""

import json
import threading
from collections import OrderedDict
from collections.abc import Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from typing import TYPE_CHECKING, Any

import numpy as np
from numpy.typing import NDArray

from srt.errors import RequestError
from srt.sampling.sampling_params import SamplingParams

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer

# Compiled sources that are known to be right, the last ones; each takes its own length.
_KNOWN_SOURCES = 64
# Work that a parser may do for one token, by its own count: some tens of milliseconds.
_STEP_FUEL = 200_000
_STEP_ITEMS = 50_000

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
        self._known: OrderedDict[str, None] = OrderedDict()
        self._vocabulary: LLTokenizer | None = None
        self._executor: ThreadPoolExecutor | None = None

    def check(self, params: SamplingParams) -> None:
        """Whether the grammar of a request can be compiled, if it has one. That takes from a
        millisecond to some seconds; any thread may call it.

        Raises:
            RequestError: It cannot; the message says where and why.
        """
        source = _source(params)
        if source is None:
            return
        name, grammar = source
        self._check_request(name, params)
        with self._lock:
            if grammar in self._known:
                self._known.move_to_end(grammar)
                return
        from llguidance import LLMatcher

        # The vocabulary matters: a grammar may name special tokens.
        matcher = LLMatcher(self._get_vocabulary(), grammar, log_level=0, limits=_make_limits())
        problem = matcher.get_error() if matcher.is_error() else ""
        if not problem:
            matcher.compute_bitmask()
            problem = matcher.get_error() if matcher.is_error() else ""
        if problem:
            raise RequestError(f"{name} cannot be used: {_in_a_line(problem)}")
        with self._lock:
            self._known[grammar] = None
            while len(self._known) > _KNOWN_SOURCES:
                self._known.popitem(last=False)

    def make(self, params: SamplingParams) -> "Grammar | None":
        """The grammar of a request at its beginning; None if it has none.

        Raises:
            RequestError: As of :meth:`check`.
        """
        source = _source(params)
        if source is None:
            return None
        self.check(params)
        with self._lock:
            if self._executor is None:
                self._executor = ThreadPoolExecutor(1, "srt-grammar")
        reasoning = tuple(params.reasoning_tokens or ())
        return Grammar(self, source[1], self._executor, self._vocab_size, reasoning)

    def matcher(self, grammar: str) -> "LLMatcher":
        """A parser at the beginning of a grammar that has been checked."""
        from llguidance import LLMatcher

        return LLMatcher(self._get_vocabulary(), grammar, log_level=0, limits=_make_limits())

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
        with self._lock:
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
        source: The grammar.
        executor: Where the parser works.
        vocab_size: The length of a mask.
        reasoning: Tokens that begin and end reasoning, or that end it (see `SamplingParams`).
    """

    def __init__(
        self,
        compiler: GrammarCompiler,
        source: str,
        executor: ThreadPoolExecutor,
        vocab_size: int,
        reasoning: Sequence[int] = (),
    ) -> None:
        self._reasoning = tuple(reasoning)
        self._compiler = compiler
        self._source = source
        self._executor = executor
        self._vocab_size = vocab_size
        self._matcher: LLMatcher | None = None  # the executor's
        self._consumed: list[int] = []  # the executor's
        self._pending: tuple[tuple[int, ...], Future[TokenMask]] | None = None
        self.prepare(())

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
        matcher = self._matcher
        if matcher is None:
            matcher = self._matcher = self._compiler.matcher(self._source)
            self._consumed = []
        ids = list(output_ids)
        common = next(
            (i for i, (a, b) in enumerate(zip(self._consumed, ids, strict=False)) if a != b),
            min(len(self._consumed), len(ids)),
        )
        behind, self._consumed = len(self._consumed) - common, ids
        if behind:
            matcher.rollback(behind)
        if ids[common:]:
            matcher.consume_tokens(ids[common:])
        content = b"" if matcher.is_error() else matcher.compute_bitmask()
        if matcher.is_error():
            problem, self._matcher = _in_a_line(matcher.get_error()), None
            raise RequestError(f"the output cannot follow its grammar any further: {problem}")
        bits = np.frombuffer(content, dtype=np.uint8)
        return np.unpackbits(bits, count=self._vocab_size, bitorder="little").view(np.bool_)


def _source(params: SamplingParams) -> tuple[str, str] | None:
    """The parameter that says what an output follows, and the grammar that it means."""
    if params.json_schema is not None:
        from llguidance import LLMatcher

        # One space after separators and no other white space: a model that begins to write some
        # could otherwise go on for ever.
        options: Any = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
        schema = json.loads(str(params.json_schema))
        if isinstance(schema, bool):
            schema = {} if schema else {"enum": []}
        schema.pop("x-guidance", None)
        return "json_schema", LLMatcher.grammar_from_json_schema(schema, overrides=options)
    if params.regex is not None:
        from llguidance import LLMatcher

        return "regex", LLMatcher.grammar_from_regex(params.regex)
    if params.grammar is not None:
        from llguidance import LLMatcher
        from llguidance.gbnf_to_lark import any_to_lark

        try:
            lark = any_to_lark(params.grammar)
        except Exception as error:
            raise RequestError(f"grammar cannot be used: {error}") from error
        return "grammar", LLMatcher.grammar_from_lark(lark)
    return None


def _in_a_line(problem: str) -> str:
    """What llguidance says, without its state."""
    return " ".join(problem.partition("<state>")[0].split())


def _make_limits() -> Any:
    from llguidance import LLParserLimits

    return LLParserLimits(step_lexer_fuel=_STEP_FUEL, step_max_items=_STEP_ITEMS)
