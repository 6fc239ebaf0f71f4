"""The open requests of this process's engine: prepare, open, step, branch, close."""

import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import TypeVar

from quire.core.adapters import BASE_MODEL
from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.core.sequence import PrefixMiss
from quire.engine.engine import Engine
from quire.engine_client.image_prompts import ImagePrompts, no_images
from quire.engine_client.inputs import PromptInput, RequestOptions
from quire.engine_client.outputs import RequestAssembler
from quire.engine_client.pooling_inputs import PoolingInput
from quire.engine_client.results import PrefixMissReport, RequestOutput
from quire.errors import AdapterError, InvalidRequestError
from quire.offline.exit_gate import ExitGate
from quire.offline.request_group import RequestGroup
from quire.offline.request_preparer import RequestPreparer
from quire.offline.turns import Turns
from quire.text.tokenizer import Tokenizer

T = TypeVar("T")


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
        """Threads enter `gate` to use the engine. `images` reads the images of prompts."""
        self._preparer = RequestPreparer(engine, tokenizer, seed, images)
        self._engine = engine
        self._tokenizer = tokenizer
        self._open: dict[str, tuple[RequestAssembler, RequestGroup]] = {}
        self._turns = Turns(self._step, gate)

    def prepare(
        self,
        prompts: Sequence[PromptInput],
        params: Sequence[SamplingParams],
        beams: BeamSearchParams | None = None,
    ) -> RequestGroup:
        """Tokenize and check the requests of one call. Raises InvalidRequestError.

        If the images of the prompts take more than MAX_HELD_BYTES, the last prompts are left to
        `open_rest`. `params` are copied, so that the caller may change them. With `beams`, the
        requests are beam searches, and `params` must be `sampling_params_of(beams)`.
        """
        return self._preparer.prepare(prompts, params, beams)

    def prepare_pooling(
        self, inputs: Sequence[tuple[PoolingInput, RequestOptions]]
    ) -> RequestGroup:
        """Check the requests of a call that embeds or scores. Raises InvalidRequestError."""
        return self._preparer.prepare_pooling(inputs)

    def open(self, group: RequestGroup) -> None:
        """Give a group's requests to the engine, all or none. Raises InvalidRequestError."""
        with self._turns.turn():
            try:
                for assembler in group.assemblers:
                    self._open_one(assembler, group)
            except BaseException:
                self._close(group.assemblers)
                raise

    def open_rest(self, group: RequestGroup) -> None:
        """Prepare and open further requests of an open group, while their images have room.

        A request that can't be served ends with an error, since others of its call have run.
        """
        while group.takes_more:
            assembler = self._preparer.prepare_next(group)
            with self._turns.turn():
                try:
                    self._open_one(assembler, group)
                except InvalidRequestError as error:
                    group.fail(assembler, str(error))

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
        token_ids = self._preparer.inputs.tokenize(no_images(prompt).prompt)
        digest = BASE_MODEL
        for found in self._preparer.find_adapters([prompt]).values():
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
        decoding = self._preparer.inputs.resolve(params, len(request.prompt_token_ids), seed)
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

    # ---- inside: these methods need the turn -----------------------------------------------

    def _open_one(self, assembler: RequestAssembler, group: RequestGroup) -> None:
        """Give one request to the engine, or end it if it is one of the group's failures."""
        request = assembler.request
        if request.request_id in group.failures:
            group.fail(assembler, group.failures[request.request_id])
            return
        self._engine.add(request)
        self._open[request.request_id] = (assembler, group)
        # The engine drops its inputs of the encoder at the request's end, the caller's group later.
        assembler.request = replace(request, contents=())

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
                group.end(output.request_id)
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
