"""Turns the prompts of a call of the offline API into checked requests.

Reads images and tokenizes texts, without the turn of `turns`, so that other threads may step the
engine meanwhile. Called by `request_table`.
"""

import random
import time
from collections import deque
from collections.abc import Sequence
from itertools import count

from quire.core.request import Request
from quire.core.sampling_params import BeamSearchParams, DecodingParams, SamplingParams
from quire.engine.engine import Engine
from quire.engine_client.image_prompts import ImagePrompts
from quire.engine_client.inputs import InputProcessor, PromptInput, RequestOptions
from quire.engine_client.outputs import RequestAssembler
from quire.engine_client.pooling_inputs import PoolingInput
from quire.engine_client.results import RequestMetrics
from quire.errors import AdapterError, InvalidRequestError
from quire.offline.request_group import Adapters, RequestGroup
from quire.text.tokenizer import Tokenizer


class RequestPreparer:
    """Prepares requests for one engine. Threads may share it."""

    def __init__(
        self, engine: Engine, tokenizer: Tokenizer | None, seed: int, images: ImagePrompts
    ) -> None:
        """`images` reads the images of prompts. `seed` determines the seeds of requests that have
        none."""
        self.inputs = InputProcessor(tokenizer, engine.limits, engine.grammars.compile)
        self._engine = engine
        self._tokenizer = tokenizer
        self._images = images
        self._seeds = random.Random(seed)
        self._ids = count()

    def prepare(
        self,
        prompts: Sequence[PromptInput],
        params: Sequence[SamplingParams],
        beams: BeamSearchParams | None = None,
    ) -> RequestGroup:
        """See `RequestTable.prepare`."""
        copies = {id(own): own.clone() for own in params}  # prompts often share a SamplingParams
        pairs = zip(prompts, (copies[id(own)] for own in params), strict=True)
        adapters = self.find_adapters(prompts)
        group = RequestGroup(rest=deque(pairs), beams=beams, adapters=adapters)
        while group.takes_more:
            group.add(self._prepare(group, *group.rest.popleft()))
        return group

    def prepare_pooling(
        self, inputs: Sequence[tuple[PoolingInput, RequestOptions]]
    ) -> RequestGroup:
        """Check the requests of a call that embeds or scores. Raises InvalidRequestError."""
        group = RequestGroup()
        for given, options in inputs:
            self._check_deadline(options)
            request = given.request(str(next(self._ids)), self._engine.limits, options)
            group.add(RequestAssembler(request, SamplingParams(max_tokens=1), None, None))
        return group

    def prepare_next(self, group: RequestGroup) -> RequestAssembler:
        """Prepare the next of the group's `rest`. A request that can't be served is one of the
        group's failures."""
        prompt, params = group.rest.popleft()
        try:
            assembler = self._prepare(group, prompt, params)
        except InvalidRequestError as error:
            assembler = self._unprepared(prompt, params)
            group.failures[assembler.request.request_id] = str(error)
        group.add(assembler)
        return assembler

    def find_adapters(self, prompts: Sequence[PromptInput]) -> Adapters:
        """Find the adapters that the prompts name. Raises InvalidRequestError if the engine has no
        adapters."""
        named = {prompt.adapter for prompt in prompts if prompt.adapter is not None}
        futures = {
            each: self._engine.adapters.find(each.lora_name, each.lora_path) for each in named
        }
        found: Adapters = {}
        for each, future in futures.items():
            try:
                found[each] = future.result()
            except AdapterError as error:
                found[each] = error
        return found

    def _prepare(
        self, group: RequestGroup, prompt: PromptInput, params: SamplingParams
    ) -> RequestAssembler:
        """Read the prompt's images, and check its request. Raises InvalidRequestError."""
        self._check_deadline(prompt.options)
        given = self._images.read(prompt)
        adapter = None if prompt.adapter is None else group.adapters[prompt.adapter]
        request = self.inputs.make_request(
            str(next(self._ids)),
            given.prompt,
            params,
            seed=self._seeds.getrandbits(64),
            options=prompt.options,
            beams=group.beams,
            adapter=None if isinstance(adapter, AdapterError) else adapter,
        )
        request = self.inputs.with_images(request, given.images)
        request = self.inputs.with_prediction(request, prompt.prediction)
        if isinstance(adapter, AdapterError):
            group.failures[request.request_id] = str(adapter)
        text = given.prompt if isinstance(given.prompt, str) else None
        assembler = RequestAssembler(
            request, params, self._tokenizer, text, lora_request=prompt.adapter
        )
        assembler.output.metrics = RequestMetrics(time.time(), time.monotonic())
        return assembler

    def _unprepared(self, prompt: PromptInput, params: SamplingParams) -> RequestAssembler:
        """The assembler of a request that `_prepare` refused, for its error."""
        text = prompt.prompt if isinstance(prompt.prompt, str) else None
        token_ids = [] if isinstance(prompt.prompt, str) else prompt.prompt
        name, decoding = str(next(self._ids)), DecodingParams(max_tokens=1)
        request = Request(name, token_ids, decoding, params.n)
        return RequestAssembler(request, params, None, text, lora_request=prompt.adapter)

    def _check_deadline(self, options: RequestOptions) -> None:
        deadline_s = options.deadline_s
        if deadline_s is not None and not self._engine.limits.reads_deadline:
            raise InvalidRequestError(
                f"deadline_s is {deadline_s}, but the engine's scheduling policy reads no"
                " deadlines; leave it out, or make the LLM with scheduling_policy='deadline'",
                "deadline_s",
            )
