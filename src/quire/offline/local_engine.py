"""An engine in this process, with its tokenizer and its requests.

The subclasses `llm.LLM` and `llm_engine.LLMEngine` add the methods that read prompts.
"""

import weakref
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import NoReturn

from quire.assembly.build import build_engine
from quire.assembly.model_kind import tokenizer_folder
from quire.compat.methods import COMPAT_METHODS
from quire.core.memory.kv_cache_manager import KVManagerFactory
from quire.core.memory.memory_report import BlockMap, MemoryReport
from quire.core.sampling_params import SamplingParams
from quire.engine.engine import Engine, sleep, wake_up
from quire.engine_client.image_prompts import ImagePrompts, make_reader
from quire.errors import InvalidRequestError, unknown_name
from quire.hub.model_folder import resolve_text_folder
from quire.images.reader import ImageReader
from quire.observability.log import configure
from quire.offline.engine_metrics import Metric, metrics_of
from quire.offline.exit_gate import ExitGate
from quire.offline.request_table import RequestTable
from quire.options.engine_options import EngineOptions
from quire.text.tokenizer import Tokenizer

WEIGHTS, KV_CACHE = "weights", "kv_cache"


@dataclass(frozen=True, slots=True)
class ModelFacts:
    """Facts about an engine's model, with vLLM's names."""

    #: The argument of LLM(model=...); None is the embedded model.
    model: str | None
    #: The folder of the tokenizer's files; None if the engine has no tokenizer.
    tokenizer: str | None
    #: The largest number of tokens of a prompt and its answer together.
    max_model_len: int
    #: The type of the numbers that the model computes with, such as "bfloat16".
    dtype: str
    #: The seed for requests without a seed of their own.
    seed: int
    #: The number of tokens that the model can generate.
    vocab_size: int

    def get_vocab_size(self) -> int:
        """The vocab_size, by vLLM's name."""
        return self.vocab_size


class LocalEngine:
    """An engine with its model and KV cache. Any method may be called from any thread.

    The attribute `engine` has no lock: a thread may use it only while no other thread uses it or
    calls a method.
    """

    def __init__(
        self, options: EngineOptions, *, kv_allocator: KVManagerFactory | None = None
    ) -> None:
        """Load the model. Raises ConfigurationError and its subclasses."""
        self._tokenizer: Tokenizer | None = None
        self._tokenizer_folder: Path | None = None
        if not options.skip_tokenizer_init:
            self._tokenizer_folder = tokenizer_folder(options)
            self._tokenizer = Tokenizer.from_folder(self._tokenizer_folder)
        if not options.disable_log_stats:
            configure("info")
        gate = ExitGate()
        ends_loading = weakref.finalize(self, gate.close)
        with gate:
            self.engine: Engine = build_engine(
                options,
                lambda *_: gate.stop_point(),
                kv_allocator=kv_allocator,
                tokenizer=self._tokenizer,
            )
        reader: ImageReader | None = None
        if self._tokenizer is not None and self.engine.limits.max_content_tokens:
            folder = resolve_text_folder(options.model, options.revision)
            reader = make_reader(folder, options, self._tokenizer)
        self._images = ImagePrompts(reader, self._tokenizer, self.engine.limits)
        self._requests = RequestTable(
            self.engine, self._tokenizer, options.seed, gate, self._images
        )
        # At exit, finalizers run in reverse order of creation. So the gate closes before the
        # finalizers that close the engine's resources, and no step is running when these run.
        weakref.finalize(self._requests, gate.close)
        ends_loading.detach()
        self._model_config = ModelFacts(
            model=options.model,
            tokenizer=None if self._tokenizer_folder is None else str(self._tokenizer_folder),
            max_model_len=self.engine.limits.max_model_len,
            dtype=str(self.engine.facts["dtype"]),
            seed=options.seed,
            vocab_size=self.engine.limits.vocab_size,
        )

    def __getattr__(self, name: str) -> NoReturn:
        """Refuses an unknown attribute, with advice."""
        raise unknown_name(self, name, COMPAT_METHODS)

    @property
    def model_config(self) -> ModelFacts:
        """Facts about the model."""
        return self._model_config

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidRequestError under skip_tokenizer_init."""
        if self._tokenizer is None:
            raise InvalidRequestError("this LLM was made with skip_tokenizer_init: it has none")
        return self._tokenizer

    def get_default_sampling_params(self) -> SamplingParams:
        """New params with the model's own defaults (`generation_config.json`) filled in."""
        return SamplingParams(**asdict(self.engine.limits.defaults))

    def get_metrics(self) -> list[Metric]:
        """The engine's counters, gauges and histograms since it was made."""
        return metrics_of(self._requests.between_steps(Engine.stats))

    def memory_report(self) -> MemoryReport:
        """The current use of every byte of the KV cache; `print` shows it as a table."""
        return self._requests.between_steps(Engine.memory_report)

    def block_map(self) -> BlockMap:
        """The current use of each block of the KV cache."""
        return self._requests.between_steps(Engine.block_map)

    def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Forget all cached prefixes, including pinned and published ones. Returns True.

        Running requests keep their blocks, but no later request finds them in the cache. In vLLM,
        `reset_running_requests` preempts running requests to free their blocks; here it has no
        effect.
        """
        self._requests.between_steps(Engine.clear_prefixes)
        return True

    def sleep(self, level: int = 1) -> None:
        """Release the memory of the KV cache, with all cached prefixes. The weights stay in memory.

        Requests are refused until `wake_up`. `level` must be 1. vLLM also has level 2, which drops
        the weights; here, delete the LLM instead. Raises InvalidRequestError for another level, and
        while requests are running.
        """
        if level != 1:
            raise InvalidRequestError(
                f"level is {level!r}, but must be 1, which keeps the weights; to drop them, too,"
                " delete the LLM and make it again",
                "level",
            )
        self._requests.between_steps(sleep)

    def wake_up(self, tags: Sequence[str] | None = None) -> None:
        """Allocate the memory of the KV cache again. Does nothing if the engine is awake.

        `tags` are vLLM's: "weights", which are always there, and "kv_cache"; None means both.
        Raises InsufficientMemoryError; the engine then stays asleep.
        """
        for tag in tags or ():
            if tag not in (WEIGHTS, KV_CACHE):
                raise InvalidRequestError(
                    f"tags contains {tag!r:.80}, but each must be {WEIGHTS!r} or {KV_CACHE!r}",
                    "tags",
                )
        if tags is None or KV_CACHE in tags:
            self._requests.between_steps(wake_up)

    def is_sleeping(self) -> bool:
        """Whether `sleep` was called, and `wake_up` was not called since."""
        return self.engine.is_asleep
