"""What the handlers of requests work with."""

from dataclasses import dataclass, field

from srt.configs.engine_config import EngineConfig
from srt.entrypoints.model_files import ModelFiles
from srt.serve.config import ServerConfig
from srt.serve.engine.client import EngineClient
from srt.serve.metrics import EngineReading, ServerMetrics
from srt.serve.parsers.choice import AnswerParsers
from srt.version import __version__


@dataclass
class ServerState:
    """One server's.

    Attributes:
        config: Its options.
        engine_config: Those of its engine.
        files: The model without its weights: turns prompts and conversations into token ids, and
            checks requests.
        parsers: Find reasoning and tool calls in answers.
        engine: Runs requests.
        model_names: Names of the model; answers have the first.
        started_at: When the server was started, in seconds since 1970.
        is_draining: Whether it takes no more requests, since it is about to end.
        metrics: What is counted and timed.
    """

    config: ServerConfig
    engine_config: EngineConfig
    files: ModelFiles
    parsers: AnswerParsers
    engine: EngineClient
    model_names: tuple[str, ...]
    started_at: int
    is_draining: bool = False
    metrics: ServerMetrics = field(default_factory=ServerMetrics)

    def __post_init__(self) -> None:
        self.metrics.watch_engine(self._read_engine)

    def _read_engine(self) -> EngineReading:
        engine = self.engine
        return self.model_name, engine.stats, engine.facts, engine.num_queued, engine.restarts

    @property
    def model_name(self) -> str:
        """The name that answers have."""
        return self.model_names[0]

    @property
    def fingerprint(self) -> str:
        """What an answer to one seed depends on, in a word: answers with the same are the same."""
        facts = self.engine.facts
        assert facts is not None
        return f"srt-{__version__}-{facts.tier}-{facts.dtype}-{facts.kv_cache_dtype}"
