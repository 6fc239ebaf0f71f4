"""Requests under way in this process: opened, stepped, branched and closed inside the caller's
calls. What `LLM` and `Generation` stand on; not for several threads at once.
"""

import random
from collections.abc import Sequence

from quire.core.prefix_miss import PrefixMiss
from quire.core.sampling_params import SamplingParams, Wish
from quire.engine.engine import Engine
from quire.engine.inputs import InputProcessor, PromptInput
from quire.engine.interrupts import deferred_interrupts
from quire.engine.outputs import PrefixMissReport, RequestAssembler
from quire.errors import InvalidRequestError
from quire.text.tokenizer import Tokenizer


class OpenRequests:
    """One engine and those who wait for it.

    Invariant: an open request is in the engine, unless all its branches have ended.
    """

    def __init__(self, engine: Engine, tokenizer: Tokenizer | None, seed: int) -> None:
        self._engine = engine
        self._tokenizer = tokenizer
        self._inputs = InputProcessor(tokenizer, engine.limits)
        self._seeds = random.Random(seed)
        self._open: dict[str, RequestAssembler] = {}
        self._num_opened = 0

    def open(self, prompt: PromptInput, wish: Wish) -> RequestAssembler:
        """Check a request and give it to the engine. Raises InvalidRequestError."""
        request = self._inputs.make_request(
            str(self._num_opened),
            prompt.prompt,
            wish,
            seed=self._seeds.getrandbits(64),
            options=prompt.options,
        )
        self._num_opened += 1
        text = prompt.prompt if isinstance(prompt.prompt, str) else None
        assembler = RequestAssembler(request, wish, self._tokenizer, text)
        self._engine.add(request)
        self._open[request.request_id] = assembler
        return assembler

    def pin(self, prompt: PromptInput, priority: int, duration_s: float | None) -> int:
        """See `Engine.pin_prefix`; the domain is that of the prompt's options."""
        token_ids = self._inputs.tokenize(prompt.prompt)
        with deferred_interrupts():
            return self._engine.pin_prefix(
                token_ids, prompt.options.cache_domain, priority, duration_s
            )

    def step(self) -> tuple[int, set[str]]:
        """One step for all open requests: how many tokens it brought, which requests it ended."""
        with deferred_interrupts():
            return self._step()

    def fork(self, assembler: RequestAssembler, branch_index: int, params: SamplingParams) -> int:
        """Branch a running request; the index of the new branch. See `Generation.fork`."""
        if params.n != 1:
            raise InvalidRequestError(f"n is {params.n}, but a fork is one branch", "n")
        parent = assembler.output.outputs[branch_index]
        if params.logprobs is not None and parent.logprobs is None:
            raise InvalidRequestError(
                "logprobs is set for a fork of a branch that has none for its own tokens; ask for"
                " them from the start",
                "logprobs",
            )
        request = assembler.request
        seed = request.params.seed if params.seed is None else params.seed
        decoding = self._inputs.resolve(params, len(request.prompt_token_ids), seed)
        with deferred_interrupts():
            index = self._engine.fork(request.request_id, branch_index, decoding)
            added = assembler.add_branch(branch_index, params)
        assert added == index, f"the engine's branch {index} is branch {added} here"
        return index

    def end_branch(self, assembler: RequestAssembler, branch_index: int) -> None:
        """Give up a branch, and the request with the last of them; ended ones are left alone."""
        with deferred_interrupts():
            self._engine.abort(assembler.request.request_id, branch_index)
            assembler.abandon(branch_index)
            if assembler.finished:
                self.close([assembler])

    def close(self, assemblers: Sequence[RequestAssembler]) -> None:
        """Forget requests; those that have not ended are aborted."""
        with deferred_interrupts():
            for assembler in assemblers:
                request_id = assembler.request.request_id
                miss = self._engine.prefix_miss(request_id)
                if miss is not None:
                    assembler.output.prefix_miss = self._report(miss)
                self._engine.abort(request_id)
                self._open.pop(request_id, None)
            self._engine.settle()

    def _step(self) -> tuple[int, set[str]]:
        num_tokens = 0
        finished: set[str] = set()
        for output in self._engine.step():
            num_tokens += len(output.token_ids)
            assembler = self._open.get(output.request_id)
            if assembler is None:
                continue
            for branch_index in assembler.push(output):
                self._engine.abort(output.request_id, branch_index)
            if assembler.finished:
                finished.add(output.request_id)
        self._engine.settle()
        return num_tokens, finished

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
