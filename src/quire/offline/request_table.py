"""The open requests of this process's engine: prepare, open, step, branch, close."""

import random
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from itertools import count
from typing import TypeVar

from quire.core.adapters import BASE_MODEL, AdapterRef, LoRARequest
from quire.core.request import FinishReason, SequenceOutput
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.core.sequence import PrefixMiss
from quire.engine.engine import Engine
from quire.engine_client.image_prompts import ImagePrompts, no_images
from quire.engine_client.inputs import InputProcessor, PromptInput, RequestOptions
from quire.engine_client.outputs import RequestAssembler
from quire.engine_client.pooling_inputs import PoolingInput
from quire.engine_client.results import PrefixMissReport, RequestMetrics, RequestOutput
from quire.errors import AdapterError, InvalidRequestError
from quire.offline.exit_gate import ExitGate
from quire.offline.turns import Turns
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")

Adapters = dict[LoRARequest, AdapterRef | AdapterError]
"""The adapter found for each LoRARequest, or the error if it can't be read."""


@dataclass(slots=True)
class RequestGroup:
    """The requests of one call."""

    assemblers: list[RequestAssembler]
    #: Ids of the requests that have not ended.
    unfinished: set[str]
    #: Number of tokens that came since `RequestTable.wait` last returned.
    num_new_tokens: int = 0
    #: Number of requests that ended since `RequestTable.wait` last returned.
    num_ended: int = 0
    #: Error messages, by id, of requests that can't be computed; `RequestTable.open` ends these.
    failures: dict[str, str] = field(default_factory=dict)


class RequestTable:
    """One engine, its open requests, and the threads that wait for them.

    Invariants: an open request is in the engine, unless all its branches have ended. Only the
    thread that has the turn (see `turns`) uses the engine and the assemblers of open requests.
    """

    def __init__(
        self,
        engine: Engine,
        tokenizer: Tokenizer | None,
        seed: int,
        gate: ExitGate,
        images: ImagePrompts,
    ) -> None:
        """Threads enter `gate` to use the engine. `images` reads those of prompts."""
        self._images = images
        self._engine = engine
        self._tokenizer = tokenizer
        self._inputs = InputProcessor(tokenizer, engine.limits, engine.grammars.compile)
        self._seeds = random.Random(seed)
        self._ids = count()
        self._open: dict[str, tuple[RequestAssembler, RequestGroup]] = {}
        self._turns = Turns(self._step, gate)

    def prepare(
        self,
        prompts: Sequence[PromptInput],
        params: Sequence[SamplingParams],
        beams: BeamSearchParams | None = None,
    ) -> RequestGroup:
        """Tokenize and check the requests of one call. Raises InvalidRequestError.

        `params` are copied, so that the caller may change them. With `beams`, the requests are beam
        searches, and `params` must be `sampling_params_of(beams)`.
        """
        prompts = [self._images.read(prompt) for prompt in prompts]
        copies = {id(own): own.clone() for own in params}  # prompts often share a SamplingParams
        pairs = zip(prompts, (copies[id(own)] for own in params), strict=True)
        adapters = _find_adapters(self._engine, prompts)
        found = [self._prepare(prompt, own, beams, adapters) for prompt, own in pairs]
        group = RequestGroup(found, {assembler.request.request_id for assembler in found})
        for prompt, assembler in zip(prompts, found, strict=True):
            error = None if prompt.adapter is None else adapters[prompt.adapter]
            if isinstance(error, AdapterError):
                group.failures[assembler.request.request_id] = str(error)
        return group

    def prepare_pooling(
        self, inputs: Sequence[tuple[PoolingInput, RequestOptions]]
    ) -> RequestGroup:
        """Check the requests of a call that embeds or scores. Raises InvalidRequestError."""
        found = []
        for given, options in inputs:
            self._check_deadline(options)
            request = given.request(str(next(self._ids)), self._engine.limits, options)
            found.append(RequestAssembler(request, SamplingParams(max_tokens=1), None, None))
        return RequestGroup(found, {assembler.request.request_id for assembler in found})

    def open(self, group: RequestGroup) -> None:
        """Give a group's requests to the engine, all or none. Raises InvalidRequestError."""
        with self._turns.turn():
            try:
                for assembler in group.assemblers:
                    request_id = assembler.request.request_id
                    if request_id in group.failures:
                        _end(assembler, group, group.failures[request_id])
                        continue
                    self._engine.add(assembler.request)
                    self._open[request_id] = (assembler, group)
            except BaseException:
                self._close(group.assemblers)
                raise

    def wait(self, group: RequestGroup, *, for_all: bool) -> tuple[int, int]:
        """Wait until any request of the group has ended; with `for_all`, until all have ended.

        Returns the number of the group's requests that ended since the last call, and the number of
        tokens that came. Returns at once if no request is unfinished.
        """
        found = (0, 0)

        def has_come() -> bool:
            nonlocal found
            if group.unfinished and (for_all or not group.num_ended):
                return False
            found = group.num_ended, group.num_new_tokens
            group.num_ended = group.num_new_tokens = 0
            return True

        self._turns.until(has_come)
        return found

    def next_text(self, assembler: RequestAssembler, branch_index: int) -> str:
        """Wait for the branch's next text. Returns "" if the branch has ended."""
        found = ""

        def has_come() -> bool:
            nonlocal found
            found = assembler.pop_delta(branch_index).text
            return bool(found) or assembler.has_ended(branch_index)

        self._turns.until(has_come)
        return found

    def step(self, assembler: RequestAssembler, branch_index: int) -> str:
        """Step the engine once, unless the branch has ended. Returns the branch's new text, which
        may be empty."""
        with self._turns.turn():
            if not assembler.has_ended(branch_index):
                self._turns.step()
            return assembler.pop_delta(branch_index).text

    def output(self, assembler: RequestAssembler) -> RequestOutput:
        """The output of an open request so far."""
        with self._turns.turn():
            return assembler.output

    def between_steps(self, action: Callable[[Engine], T]) -> T:
        """Call `action` with the engine between two steps, and return its result."""
        with self._turns.turn():
            return action(self._engine)

    def advance(self) -> None:
        """Step the engine once for all open requests, if it has work."""
        with self._turns.turn():
            if self._engine.has_work():
                self._turns.step()

    def pin(self, prompt: PromptInput, priority: int, duration_s: float | None) -> int:
        """See `Engine.pin_prefix`. The cache domain is taken from the prompt's options.

        Raises AdapterError if the prompt's adapter can't be read.
        """
        token_ids = self._inputs.tokenize(no_images(prompt).prompt)
        digest = BASE_MODEL
        for found in _find_adapters(self._engine, [prompt]).values():
            if isinstance(found, AdapterError):
                raise found
            digest = found.digest
        with self._turns.turn():
            return self._engine.pin_prefix(
                token_ids, prompt.options.cache_domain, priority, duration_s, digest
            )

    def fork(self, assembler: RequestAssembler, branch_index: int, params: SamplingParams) -> int:
        """Fork a branch of a running request. Returns the index of the new branch.

        See `BranchHandle.fork`.
        """
        if params.n != 1:
            raise InvalidRequestError(f"n is {params.n}, but a fork is one branch", "n")
        params = params.clone()
        request = assembler.request
        seed = request.params.seed if params.seed is None else params.seed
        decoding = self._inputs.resolve(params, len(request.prompt_token_ids), seed)
        with self._turns.turn():
            parent = assembler.output.outputs[branch_index]
            if parent.finished:
                raise InvalidRequestError("a generation that has ended can't be forked")
            if params.wants_logprobs and parent.logprobs is None:
                raise InvalidRequestError(
                    "logprobs is set for a fork, but the forked branch has no logprobs; set them"
                    " when the request is started",
                    "logprobs",
                )
            index = self._engine.fork(request.request_id, branch_index, decoding)
            added = assembler.add_branch(branch_index, params)
        assert added == index, f"the engine's branch {index} is branch {added} here"
        return index

    def end_branch(self, assembler: RequestAssembler, branch_index: int) -> None:
        """Abort a branch, unless it has ended, and close the request after its last branch."""

        def end() -> None:
            self._engine.abort(assembler.request.request_id, branch_index)
            assembler.abandon(branch_index)
            if assembler.finished:
                self._close([assembler])

        self._turns.run_with_turn(end)

    def close(self, group: RequestGroup) -> None:
        """Forget a group's requests, and abort all that have not ended."""
        self._turns.run_with_turn(lambda: self._close(group.assemblers))

    def abandon(self, group: RequestGroup) -> None:
        """Close a group without waiting. If another thread has the turn, that thread closes the
        group."""
        self._turns.run_or_postpone(lambda: self._close(group.assemblers))

    # ---- inside: all but `_prepare` and `_check_deadline` need the turn ---------------------

    def _prepare(
        self,
        prompt: PromptInput,
        params: SamplingParams,
        beams: BeamSearchParams | None,
        adapters: Adapters,
    ) -> RequestAssembler:
        self._check_deadline(prompt.options)
        adapter = None if prompt.adapter is None else adapters[prompt.adapter]
        request = self._inputs.make_request(
            str(next(self._ids)),
            prompt.prompt,
            params,
            seed=self._seeds.getrandbits(64),
            options=prompt.options,
            beams=beams,
            adapter=None if isinstance(adapter, AdapterError) else adapter,
        )
        request = self._inputs.with_images(request, prompt.images)
        request = self._inputs.with_prediction(request, prompt.prediction)
        text = prompt.prompt if isinstance(prompt.prompt, str) else None
        assembler = RequestAssembler(
            request, params, self._tokenizer, text, lora_request=prompt.adapter
        )
        assembler.output.metrics = RequestMetrics(time.time(), time.monotonic())
        return assembler

    def _check_deadline(self, options: RequestOptions) -> None:
        deadline_s = options.deadline_s
        if deadline_s is not None and not self._engine.limits.reads_deadline:
            raise InvalidRequestError(
                f"deadline_s is {deadline_s}, but the engine's scheduling policy reads no"
                " deadlines; leave it out, or make the LLM with scheduling_policy='deadline'",
                "deadline_s",
            )

    def _close(self, assemblers: Sequence[RequestAssembler]) -> None:
        for assembler in assemblers:
            request_id = assembler.request.request_id
            miss = self._engine.prefix_miss(request_id)
            if miss is not None:
                assembler.output.prefix_miss = self._report(miss)
            self._engine.abort(request_id)
            self._open.pop(request_id, None)
        self._engine.finish_steps()

    def _step(self) -> None:
        outputs = self._engine.step()
        now_s = time.monotonic()
        for output in outputs:
            assembler, group = self._open.get(output.request_id, (None, None))
            if assembler is None or group is None:
                continue
            group.num_new_tokens += len(output.token_ids)
            metrics = assembler.metrics
            if metrics is not None:
                metrics.count_tokens(len(output.token_ids), now_s)
            for branch_index in assembler.push(output):
                self._engine.abort(output.request_id, branch_index)
            if assembler.finished and output.request_id in group.unfinished:
                group.unfinished.remove(output.request_id)
                group.num_ended += 1
        self._engine.finish_steps()

    def _report(self, miss: PrefixMiss) -> PrefixMissReport:
        def text(token_ids: Sequence[int]) -> str | None:
            known = self._tokenizer is not None and token_ids
            return self._tokenizer.decode(token_ids) if self._tokenizer and known else None

        return PrefixMissReport(
            miss.reason.value,
            miss.num_found_tokens,
            text(miss.prompt_around),
            text(miss.cached_around),
            None if miss.eviction is None else miss.eviction.by_request_id,
            None if miss.eviction is None else miss.eviction.at_s,
        )


def _end(assembler: RequestAssembler, group: RequestGroup, message: str) -> None:
    """End a request with an error before it was given to the engine."""
    request_id = assembler.request.request_id
    for index in range(assembler.request.n):
        reason = FinishReason.ERROR
        assembler.push(SequenceOutput(request_id, index, (), finish_reason=reason, error=message))
    group.unfinished.discard(request_id)
    group.num_ended += 1


def _find_adapters(engine: Engine, prompts: Sequence[PromptInput]) -> Adapters:
    """Find the adapters that the prompts name.

    Called without the turn, so that reading an adapter doesn't delay the steps of other threads.
    Raises InvalidRequestError if the engine has no adapters.
    """
    named = {prompt.adapter for prompt in prompts if prompt.adapter is not None}
    futures = {each: engine.adapters.find(each.lora_name, each.lora_path) for each in named}
    found: Adapters = {}
    for each, future in futures.items():
        try:
            found[each] = future.result()
        except AdapterError as error:
            found[each] = error
    return found
