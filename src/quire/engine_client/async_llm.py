"""An engine for the caller's own event loop, with streamed results.

    async with AsyncLLM(max_num_seqs=8) as engine:
        async for output in engine.generate("import os", SamplingParams(max_tokens=32), "0"):
            print(output.outputs[0].text)

The engine runs in a process of its own, as with `quire serve`. If the process dies, it is
restarted, and every request continues from the tokens received so far. Imports no HTTP library and
no torch.
"""

import asyncio
import os
import random
import time
from collections.abc import AsyncGenerator, Iterable
from typing import Any, NoReturn, Self

from quire.compat.methods import COMPAT_METHODS
from quire.core.adapters import AdapterRef, LoRARequest
from quire.core.request import SequenceOutput
from quire.core.sampling_params import SamplingParams
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.image_prompts import ImagePrompts, make_reader
from quire.engine_client.inputs import (
    InputProcessor,
    PromptInput,
    read_prompt,
    with_adapters,
)
from quire.engine_client.messages import ClearPrefixes, SetPaused
from quire.engine_client.one_engine import start_one_engine
from quire.engine_client.outputs import OutputSnapshots, RequestAssembler
from quire.engine_client.request_book import RequestStream
from quire.engine_client.results import RequestMetrics, RequestOutput
from quire.errors import EngineDeadError, InvalidRequestError, QuireError, unknown_name
from quire.hub.adapter_files import FileStamps, file_stamps
from quire.hub.model_folder import resolve_text_folder
from quire.images.reader import ImageReader
from quire.option_fields import takes_arguments_of
from quire.options.engine_options import EngineOptions
from quire.text.tokenizer import Tokenizer

PAUSE_MODES = ("abort", "wait", "keep")


_KnownAdapters = dict[LoRARequest, tuple[FileStamps, AdapterRef]]
"""The engine's reply for each adapter, with the state of the adapter's files at that time."""


class _OpenRequest:
    """The sink of one request: collects its outputs and wakes its reader."""

    def __init__(self, assembler: RequestAssembler, snapshots: OutputSnapshots) -> None:
        self.stream: RequestStream | None = None
        self._assembler = assembler
        self._snapshots = snapshots
        self._news = asyncio.Event()
        self._ended = asyncio.Event()
        self._error: QuireError | None = None

    def on_output(self, output: SequenceOutput) -> None:
        assert self.stream is not None, "outputs come after the request was taken"
        if self._assembler.metrics is not None:
            self._assembler.metrics.count_tokens(len(output.token_ids), time.monotonic())
        for branch_index in self._assembler.push(output):
            self.stream.abort_branch(output.request_id, branch_index)
        self._news.set()

    def on_end(self, error: QuireError | None) -> None:
        self._error = error
        self._ended.set()
        self._news.set()

    async def wait_ended(self) -> None:
        """Wait until the request has ended, whether or not its outputs were read."""
        await self._ended.wait()

    def abandon(self) -> None:
        """End all branches now. The reader gets the outputs so far."""
        for branch in self._assembler.output.outputs:
            self._assembler.abandon(branch.index)
        if self.stream is not None:
            self.stream.close()
        self.on_end(None)

    async def next(self) -> RequestOutput | None:
        """Wait for new outputs and return all outputs since the last call; None after the last
        output. Raises the error that ended the request."""
        while True:
            found = self._snapshots.pop_output()
            if found is not None:
                return found
            if self._ended.is_set():
                if self._error is not None:
                    raise self._error.with_traceback(None)
                return None
            self._news.clear()
            await self._news.wait()


class AsyncLLM:
    """A model in an engine process. Belongs to the event loop in which it is first used.

    The process is started by `start`, or by the first `generate`.
    """

    @takes_arguments_of(EngineOptions)
    def __init__(self, model: str | None = None, **options: Any) -> None:
        """Check the options, and read the tokenizer. Arguments and errors are those of `LLM`."""
        self.options = EngineOptions.from_mapping({**options, "model": model})
        self._tokenizer: Tokenizer | None = None
        #: Reads the images of prompts; None if the model takes text only.
        self._reader: ImageReader | None = None
        if not self.options.skip_tokenizer_init:
            named = self.options.tokenizer is not None
            source = self.options.tokenizer if named else self.options.model
            revision = None if named else self.options.revision
            self._tokenizer = Tokenizer.from_folder(resolve_text_folder(source, revision))
            folder = resolve_text_folder(self.options.model, self.options.revision)
            self._reader = make_reader(folder, self.options, self._tokenizer)
        self._seeds = random.Random(self.options.seed)
        self._open: dict[str, _OpenRequest] = {}
        self._adapters: _KnownAdapters = {}
        self._may_begin = asyncio.Event()
        self._may_begin.set()
        self._starting: asyncio.Task[EngineFleet] | None = None
        self._ending: asyncio.Task[None] | None = None

    @classmethod
    def from_engine_args(cls, engine_args: EngineOptions) -> Self:
        """Make an engine with the options of `AsyncEngineArgs`."""
        return cls(**engine_args.as_mapping())

    def __getattr__(self, name: str) -> NoReturn:
        """Raise AttributeError, with advice, for a name that does not exist."""
        raise unknown_name(self, name, COMPAT_METHODS)

    async def start(self) -> None:
        """Start the engine process, unless it runs, and wait until it is ready.

        Raises ConfigurationError and its subclasses, and EngineDeadError after `shutdown`.
        """
        await self._started()

    async def _started(self) -> EngineFleet:
        if self._ending is not None:
            raise EngineDeadError("the engine was shut down; make another one")
        if self._starting is None:
            options = self.options.as_mapping()
            self._starting = asyncio.ensure_future(start_one_engine(options))
        return await asyncio.shield(self._starting)

    async def generate(
        self,
        prompt: Any,
        sampling_params: SamplingParams | None = None,
        request_id: str = "",
        *,
        priority: int | None = None,
        lora_request: LoRARequest | None = None,
    ) -> AsyncGenerator[RequestOutput, None]:
        """Continue one prompt. Yields results as sampling_params.output_kind says.

        prompt: as for `LLM.generate`. request_id: must differ from those of open requests; "" makes
        a new id. lora_request: the adapter to compute the prompt with, which needs enable_lora.
        Ending the iteration aborts the request. Raises InvalidRequestError, AdapterError, and the
        error that ended the request or the engine.
        """
        await self._may_begin.wait()
        engine = await self._started()
        params = SamplingParams() if sampling_params is None else sampling_params.clone()
        read = read_prompt(prompt if priority is None else _with_priority(prompt, priority))
        (given,) = with_adapters([read], lora_request)
        adapter = await _find_adapter(engine, self._adapters, given.adapter)
        # Reading images takes long, so it is done in a thread.
        if given.pictures or given.picture_settings:
            images = ImagePrompts(self._reader, self._tokenizer, engine.limits)
            given = await asyncio.to_thread(images.read, given)
        name = request_id or f"{self._seeds.getrandbits(64):016x}"
        if name in self._open:
            raise InvalidRequestError(f"request id {name!r:.80} is in use", "request_id")
        opened = self._open[name] = self._opened(engine, name, given, params, adapter)
        try:
            while (output := await opened.next()) is not None:
                yield output
        finally:
            self._open.pop(name, None)
            assert opened.stream is not None
            opened.stream.close()

    async def abort(self, request_id: str | Iterable[str]) -> None:
        """End requests. Their iterations yield the outputs so far, with finish_reason "abort"."""
        for name in [request_id] if isinstance(request_id, str) else list(request_id):
            if name in self._open:
                self._open[name].abandon()

    async def pause_generation(self, *, mode: str = "abort", clear_cache: bool = True) -> None:
        """Begin no more requests until `resume_generation`. When this returns, the engine makes no
        steps.

        mode: how running requests are handled: "abort" ends them with finish_reason "abort", "wait"
        waits until they end, "keep" suspends them until `resume_generation`. clear_cache: clears
        all cached prefixes. Raises InvalidRequestError, EngineDeadError.
        """
        if mode not in PAUSE_MODES:
            raise InvalidRequestError(
                f"mode is {mode!r:.80}, but must be one of {', '.join(PAUSE_MODES)}", "mode"
            )
        self._may_begin.clear()
        engine = await self._started()
        if mode == "abort":
            await self.abort(self._open)
        elif mode == "wait":
            await asyncio.gather(*(each.wait_ended() for each in self._open.values()))
        await engine.send_control(SetPaused(True))
        if clear_cache:
            await engine.send_control(ClearPrefixes())

    async def resume_generation(self) -> None:
        """Continue after `pause_generation`. Has no effect if nothing is paused."""
        if not self._may_begin.is_set():
            await (await self._started()).send_control(SetPaused(False))
            self._may_begin.set()

    async def is_paused(self) -> bool:
        """Whether `pause_generation` was called without a `resume_generation` since."""
        return not self._may_begin.is_set()

    async def reset_prefix_cache(self, reset_running_requests: bool = False) -> bool:
        """Clear all cached prefixes, like `LLM.reset_prefix_cache`."""
        await (await self._started()).send_control(ClearPrefixes())
        return True

    async def stats(self) -> dict[str, Any]:
        """The engine's statistics by name; see `engine.stats`."""
        return await (await self._started()).stats()

    async def check_health(self) -> None:
        """Raises EngineDeadError if the engine takes no requests."""
        if not (await self._started()).is_alive:
            raise EngineDeadError("the engine takes no requests")

    def get_tokenizer(self) -> Tokenizer:
        """The model's tokenizer. Raises InvalidRequestError with skip_tokenizer_init."""
        if self._tokenizer is None:
            raise InvalidRequestError(
                "the engine was made with skip_tokenizer_init, so it has no tokenizer"
            )
        return self._tokenizer

    @property
    def is_running(self) -> bool:
        """Whether the process runs, or will be started at the first use."""
        return self._ending is None

    def shutdown(self) -> "asyncio.Task[None]":
        """End the process, and every open request with EngineDeadError. May be called twice.

        Returns a task that ends when the process is gone. Without awaiting it, the process is gone
        at the latest when `asyncio.run` closes the loop.
        """
        if self._ending is None:
            self._ending = asyncio.ensure_future(self._shut_down())
            self._may_begin.set()  # wakes calls that wait for the pause to end
        return self._ending

    async def __aenter__(self) -> Self:
        await self._started()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.shutdown()

    # ---- helpers ----------------------------------------------------------------------------

    def _opened(
        self,
        engine: EngineFleet,
        name: str,
        given: PromptInput,
        params: SamplingParams,
        adapter: AdapterRef | None,
    ) -> _OpenRequest:
        inputs = InputProcessor(self._tokenizer, engine.limits)
        seed = self._seeds.getrandbits(64)
        request = inputs.make_request(
            name, given.prompt, params, seed=seed, options=given.options, adapter=adapter
        )
        request = inputs.with_images(request, given.images)
        request = inputs.with_prediction(request, given.prediction)
        text = given.prompt if isinstance(given.prompt, str) else None
        assembler = RequestAssembler(
            request, params, self._tokenizer, text, lora_request=given.adapter
        )
        assembler.output.metrics = RequestMetrics(time.time(), time.monotonic())
        opened = _OpenRequest(assembler, OutputSnapshots(assembler, params.output_kind, name))
        opened.stream = engine.generate([request], opened)
        return opened

    async def _shut_down(self) -> None:
        if self._starting is not None:
            if not self._starting.done():
                self._starting.cancel()
            found = await asyncio.gather(self._starting, return_exceptions=True)
            if isinstance(found[0], EngineFleet):
                await found[0].shutdown(drain=False)


async def _find_adapter(
    engine: EngineFleet, known: _KnownAdapters, given: LoRARequest | None
) -> AdapterRef | None:
    """The engine's reference to an adapter. The engine is asked again if the files may have
    changed."""
    if given is None:
        return None
    stamps = await asyncio.to_thread(file_stamps, given.lora_path)
    if given not in known or known[given][0] != stamps:
        path = os.path.abspath(given.lora_path)
        known[given] = stamps, await engine.find_adapter(given.lora_name, path)
    return known[given][1]


def _with_priority(prompt: Any, priority: int) -> Any:
    if isinstance(prompt, str):
        return {"prompt": prompt, "priority": priority}
    return {**prompt, "priority": priority}
