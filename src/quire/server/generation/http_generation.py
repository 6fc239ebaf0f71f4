"""The engine requests of one HTTP call while they run.

A call becomes one engine request per prompt, with n choices each: choice = prompt * n + branch.
Outputs are turned into text when they arrive from the engine, not when the client reads them, so
stop strings, deadlines and counts work even if the client does not read. Unread output is merged,
so a slow stream never takes more memory than an unstreamed answer.

Cached prefixes are shared only within a tenant, between requests with the same salt. On a server
without keys, all clients are one tenant. A key that a client sends is then not checked, but clients
with different keys share neither prefixes nor stored answers, since a gateway may issue the keys.

Called by `answer`, which writes the JSON.
"""

import asyncio
import hashlib
import time
import uuid
from collections.abc import AsyncIterator, Collection, Generator, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from types import TracebackType
from typing import Protocol, Self, cast

from starlette.requests import Request as HTTPRequest

from quire.core.adapters import AdapterRef
from quire.core.request import PhaseTimes, Request, SequenceOutput
from quire.core.sampling_params import SamplingParams
from quire.engine_client.grammar_forms import GrammarForm, WholeAnswer
from quire.engine_client.inputs import InputProcessor, RequestOptions
from quire.engine_client.logprob_entries import LogprobEntries
from quire.engine_client.outputs import RequestAssembler
from quire.engine_client.request_book import RequestStream
from quire.engine_client.results import Delta, RequestOutput
from quire.errors import (
    AdapterError,
    DeadlineExceededError,
    GrammarTooComplexError,
    InvalidRequestError,
    NoTokenLeftError,
    QuireError,
    StepFailedError,
)
from quire.images.placing import NO_IMAGES, PromptImages
from quire.server.generation.call_body import Params
from quire.server.http.long_work import call_for_text
from quire.server.limits import check_prompt_logprobs
from quire.server.service import Service
from quire.server.telemetry.monitor import CallRecord
from quire.server.tenants.tenants import NO_TENANT, Lease, Tenant

_ENCODINGS_PER_BAD_WORD = 4


@dataclass(frozen=True, slots=True)
class Caller:
    """The tenant, ids and operation of a call."""

    tenant: Tenant
    request_id: str
    call_id: str
    #: Time of arrival by time.monotonic, in seconds.
    arrival_s: float
    #: Name of the operation in OpenTelemetry's conventions.
    operation: str = "text_completion"

    @classmethod
    def of(cls, http: HTTPRequest, call_id: str, operation: str) -> Self:
        """Read the caller from the state that the middlewares set. Without middlewares, it has
        defaults."""
        state = http.scope.get("state", {})
        return cls(
            state.get("tenant", NO_TENANT),
            state.get("request_id", ""),
            call_id,
            state.get("arrival_s", time.monotonic()),
            operation,
        )


@dataclass(frozen=True, slots=True)
class Prompts:
    """The prompts that an answer continues."""

    #: Token ids, or texts that are tokenized with their special tokens in `prepare`.
    inputs: Sequence[str | list[int]]
    #: Constraint on the answers. It replaces the constraint in the sampling params unless it is
    #: None.
    form: GrammarForm | None = None
    #: Special tokens that stay in the text despite skip_special_tokens.
    kept_special_token_ids: frozenset[int] = frozenset()
    #: Names of the call's fields that the model does not read.
    left_out: Collection[str] = ()
    #: The tokens that the caller expects of each answer, for drafts.
    prediction_token_ids: tuple[int, ...] = ()
    #: Tokens that end an answer besides those that the params name.
    end_token_ids: tuple[int, ...] = ()
    #: The images of each prompt; empty if no prompt has any.
    images: Sequence[PromptImages] = ()

    def images_of(self, index: int) -> PromptImages:
        """The images of one prompt."""
        return self.images[index] if self.images else NO_IMAGES


class Placed(Protocol):
    """The fields of a body that become `RequestOptions`."""

    @property
    def priority(self) -> int: ...

    @property
    def cache_salt(self) -> str | None: ...

    @property
    def deadline_s(self) -> float | None: ...


def tenant_of(http: HTTPRequest) -> Tenant:
    """The tenant that `http.guard` has determined from the call's key."""
    return cast(Tenant, getattr(http.state, "tenant", NO_TENANT))


def options_of(
    http: HTTPRequest, body: Placed, service: Service, *, speculation_history: bool = True
) -> RequestOptions:
    """The options of a call's requests. Raises InvalidRequestError. A body without a deadline gets
    the server's. `speculation_history` is the body's."""
    deadline_s, tenant = body.deadline_s, tenant_of(http)
    default_deadline_s, added = service.default_deadline_s, 0
    if service.engine.limits.reads_priority:
        # A batch's calls go after live calls, see `batch.background`.
        added = http.scope.get("state", {}).get("added_priority", 0)
    if added and body.priority < -added:
        raise InvalidRequestError(
            f"priority is {body.priority}, but in a batch, whose calls go after live ones, must be"
            f" at least {-added}",
            "priority",
        )
    options = RequestOptions(
        priority=body.priority + added,
        tenant=tenant.name,
        cache_salt=body.cache_salt or "",
        deadline_s=default_deadline_s if deadline_s is None else deadline_s,
        speculation_history=speculation_history and tenant.speculation_history,
    )
    unchecked = unchecked_keys(http)
    if not any(unchecked):
        return options
    return replace(options, cache_salt=digest_of(*unchecked, options.cache_salt))


def unchecked_keys(http: HTTPRequest) -> list[str]:
    """The keys in a call's headers if the server has no keys to check them; otherwise empty."""
    if tenant_of(http).name:
        return []
    return [http.headers.get(name, "") for name in ("authorization", "x-api-key")]


def digest_of(*parts: str) -> str:
    """A hash that is equal only for equal parts."""
    joined = "".join(f"{len(part)}:{part}" for part in parts)
    return hashlib.blake2b(joined.encode("utf-8", "surrogatepass"), digest_size=16).hexdigest()


class HTTPGeneration:
    """The engine requests of one HTTP call. Leaving `async with` aborts requests that still run.

    Invariants: if a stop string ends a branch in this process, the branch is also ended in the
    engine; `_news` has each choice with unread output, in the order of arrival.
    """

    def __init__(
        self,
        service: Service,
        assemblers: Sequence[RequestAssembler],
        params: SamplingParams,
        caller: Caller,
    ) -> None:
        """`assemblers` has one assembler for each prompt's request; each must output deltas
        only."""
        self.requests = requests = [assembler.request for assembler in assemblers]
        self.params = params
        #: The prompts' images, whose memory counts in the server's bound until they are collected.
        self.held_images: Sequence[PromptImages] = ()
        #: Time of the call's arrival by time.monotonic, in seconds.
        self.arrival_s = caller.arrival_s
        #: Time of the call's first tokens by time.monotonic, in seconds; None before them.
        self.first_output_s: float | None = None
        #: Time of the latest tokens by time.monotonic, in seconds; None before the first.
        self.last_output_s: float | None = None
        #: The engine's times of the sequence that began or ended last; None before the first token.
        self.phases: PhaseTimes | None = None
        self._service = service
        self._caller = caller
        self._assemblers = {assembler.request.request_id: assembler for assembler in assemblers}
        self._first_choice = {
            request.request_id: index * params.n for index, request in enumerate(requests)
        }
        self._news: dict[int, tuple[RequestAssembler, int]] = {}
        self._error: Exception | None = None
        self._has_ended = False
        self._waits_for_end = False
        self._waiter: asyncio.Future[None] | None = None
        self._leaving = ExitStack()
        self._stream: RequestStream | None = None
        self._record: CallRecord | None = None
        self._lease: Lease | None = None

    @property
    def call_id(self) -> str:
        return self._caller.call_id

    @property
    def num_choices(self) -> int:
        return len(self.requests) * self.params.n

    @property
    def results(self) -> list[RequestOutput]:
        """The outputs so far, by prompt. They lack the choices' texts and log-probabilities, which
        are only in the deltas."""
        return [assembler.output for assembler in self._assemblers.values()]

    def prompt_entries(self, choice: int) -> LogprobEntries:
        """The log-probabilities of a choice's prompt. They arrive with the choice's first
        output."""
        request = self.requests[choice // self.params.n]
        entries = self._assemblers[request.request_id].prompt_entries
        assert entries is not None, "the request has prompt_logprobs"
        return entries

    async def __aenter__(self) -> Self:
        """Send the requests to the engine. Raises OverloadedError and its subclasses,
        EngineDeadError, InvalidRequestError if the call alone exceeds the tenant's bounds,
        DeadlineExceededError if the deadline has already passed."""
        left_s = self._time_left_s()
        if left_s is not None and left_s <= 0:
            raise self._deadline_error()
        service, caller = self._service, self._caller
        num_prompt_tokens = sum(len(request.prompt_token_ids) for request in self.requests)
        # `undo` reverts each of the following steps if a later step fails, or when the call ends.
        with ExitStack() as undo:
            self._lease = service.tenants.open(caller.tenant, self.num_choices, num_prompt_tokens)
            not_taken = undo.enter_context(ExitStack())
            not_taken.callback(self._lease.cancel)
            self._stream = service.engine.generate(self.requests, self)
            not_taken.pop_all()
            undo.callback(self._lease.close)
            undo.callback(self._stream.close)
            attributes = {
                "gen_ai.operation.name": caller.operation,
                "gen_ai.response.id": caller.call_id,
            }
            self._record = service.monitor.open_call(
                self.requests, caller.tenant.name, caller.request_id, attributes
            )
            if left_s is not None:
                loop = asyncio.get_running_loop()
                undo.callback(loop.call_later(left_s, self._on_deadline).cancel)
            self._leaving = undo.pop_all()
        return self

    async def __aexit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._leaving.close()
        self._stream = self._lease = None  # breaks a cycle, so that memory is freed at once
        if self._record is not None:
            self._record.close(error)

    def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """The new output since the last batch, until every choice has finished.

        A batch has each choice at most once, with all tokens that arrived since the last batch.
        Raises the error with which the engine refused a request, StepFailedError,
        DeadlineExceededError or EngineDeadError, after all output before the error was returned.
        """
        return _Batches(self)

    async def next_batch(self) -> list[tuple[int, Delta]]:
        """The next batch, as soon as there is any output; empty at the end."""
        while not self._news:
            if self._error is not None:
                raise self._error
            if self._has_ended:
                return []
            await self._wait()
        return self._pop_deltas()

    async def rest(self) -> Iterator[tuple[int, Delta]]:
        """All unread output once every choice has finished: each choice once, in order.

        The caller sleeps until then. Each choice is assembled only when it is read, since
        assembling all at once would delay other calls. Raises the same errors as `batches`.
        """
        self._waits_for_end = True
        if self._record is not None:
            self._record.on_wait_for_end()
        while self._error is None and not self._has_ended:
            await self._wait()
        if self._error is not None:
            raise self._error
        news, self._news = self._news, {}
        return (
            (choice, assembler.pop_delta(branch))
            for choice, (assembler, branch) in sorted(news.items(), key=lambda item: item[0])
        )

    def on_output(self, output: SequenceOutput) -> None:
        """Called by the stream with the output of a step. Never raises, since the connection to the
        engine serves all calls; an error ends only this call."""
        if self._error is not None:
            return
        try:
            self._add_output(output)
        except Exception as error:  # `next_batch` and `rest` raise it
            self._fail(error)

    def on_end(self, error: QuireError | None) -> None:
        """Called by the stream after the last output."""
        self._has_ended = True
        self._error = self._error or error
        self._wake()

    def _add_output(self, output: SequenceOutput) -> None:
        assert self._stream and self._record and self._lease, "outputs come inside `async with`"
        if self.first_output_s is None:
            self.first_output_s = time.monotonic()
        self.last_output_s = time.monotonic()
        self.phases = output.phases or self.phases
        self._record.on_output(output)
        self._lease.count(len(output.token_ids))
        assembler = self._assemblers[output.request_id]
        for branch in assembler.push(output):
            self._record.on_stop(output.request_id, branch)
            self._stream.abort_branch(output.request_id, branch)
        # An error may come with accepted tokens. They are returned first, without a finish reason.
        if output.token_ids or assembler.error is None:
            choice = self._first_choice[output.request_id] + output.branch_index
            self._news[choice] = (assembler, output.branch_index)
        if assembler.error is not None:
            self._fail(_error_of(assembler.error))
        elif not self._waits_for_end:
            self._wake()

    def _pop_deltas(self) -> list[tuple[int, Delta]]:
        news, self._news = self._news, {}
        return [
            (choice, assembler.pop_delta(branch)) for choice, (assembler, branch) in news.items()
        ]

    def _fail(self, error: Exception) -> None:
        """End the call with this error. The engine frees the call's blocks before its next step,
        even if nobody reads the error."""
        self._error = self._error or error
        if self._stream is not None:
            self._stream.close()
        self._wake()

    def _on_deadline(self) -> None:
        if not self._has_ended:
            self._fail(self._deadline_error())

    def _time_left_s(self) -> float | None:
        deadline_s = self.requests[0].deadline_s
        if deadline_s is None:
            return None
        return self._caller.arrival_s + deadline_s - time.monotonic()

    def _deadline_error(self) -> DeadlineExceededError:
        num_tokens = sum(
            len(choice.token_ids) for result in self.results for choice in result.outputs
        )
        return DeadlineExceededError(
            f"the call was ended at its deadline, {self.requests[0].deadline_s:g} s after arrival,"
            f" with {num_tokens} tokens generated; allow more time with deadline_s, or ask for"
            " fewer tokens"
        )

    async def _wait(self) -> None:
        self._waiter = asyncio.get_running_loop().create_future()
        try:
            await self._waiter
        finally:
            self._waiter = None

    def _wake(self) -> None:
        if self._waiter is not None and not self._waiter.done():
            self._waiter.set_result(None)


def _error_of(message: str) -> QuireError:
    """The exception for the error message of a branch."""
    if message == NoTokenLeftError.TEXT:
        return NoTokenLeftError(message)
    if message.startswith(GrammarTooComplexError.TEXT):
        return GrammarTooComplexError(message, "structured_outputs")
    if message.startswith(AdapterError.TEXT):
        return AdapterError(message)
    return StepFailedError(message)


class _Batches:
    """Iterates over batches. Unlike a generator, it needs no `aclose` if iteration stops early."""

    def __init__(self, generation: HTTPGeneration) -> None:
        self._generation = generation

    def __aiter__(self) -> Self:
        return self

    async def __anext__(self) -> list[tuple[int, Delta]]:
        batch = await self._generation.next_batch()
        if not batch:
            raise StopAsyncIteration
        return batch


async def prepare(
    service: Service,
    caller: Caller,
    prompts: Prompts,
    params: Params,
    options: RequestOptions,
    adapter: AdapterRef | None = None,
) -> HTTPGeneration:
    """Tokenize and check the prompts; the answers are computed with `adapter`. Raises
    InvalidRequestError, ServerDrainingError, OverloadedError if the server has no room."""
    service.check_accepting()
    if prompts.end_token_ids and params.beams is None:
        params = _with_ends(params, prompts.end_token_ids)
    # If the engine has no room for the call, refuse it before any other work.
    service.engine.check_room(len(prompts.inputs) * params.sampling.n)
    words = params.sampling.bad_words or ()
    inputs = InputProcessor(service.tokenizer, service.engine.limits)
    wanted = params.sampling.structured_outputs
    form = prompts.form if wanted is None or prompts.form is not None else WholeAnswer(wanted)
    grammar = await service.grammars.grammar_for(form, options)
    size = sum(len(prompt) for prompt in prompts.inputs if isinstance(prompt, str))
    size += _ENCODINGS_PER_BAD_WORD * sum(len(word) for word in words)
    token_ids = await call_for_text(size, _tokenize, inputs, prompts.inputs, words)
    maker = _RequestMaker(service, caller, inputs, prompts, params, options, grammar, adapter)
    return await service.work.run(maker.make(token_ids))


def _with_ends(params: Params, end_token_ids: Sequence[int]) -> Params:
    """The params with further tokens that end an answer."""
    ends = [*(params.sampling.stop_token_ids or ()), *end_token_ids]
    return Params(replace(params.sampling, stop_token_ids=ends), params.beams)


def _tokenize(
    inputs: InputProcessor, prompts: Sequence[str | list[int]], bad_words: Sequence[str]
) -> list[list[int]]:
    inputs.prepare_bad_words(bad_words)
    with blamed_on("prompt"):
        return [
            inputs.tokenize(prompt) if isinstance(prompt, str) else prompt for prompt in prompts
        ]


@dataclass(frozen=True, slots=True)
class _RequestMaker:
    """Makes the requests of a call from the settings that they share."""

    service: Service
    caller: Caller
    inputs: InputProcessor
    prompts: Prompts
    params: Params
    options: RequestOptions
    grammar: str | None
    adapter: AdapterRef | None

    def make(self, token_ids: Sequence[list[int]]) -> Generator[None, None, HTTPGeneration]:
        """The call's requests. May pause at every yield."""
        tokenizer, params = self.service.tokenizer, self.params.sampling
        assemblers = []
        for index, (prompt, ids) in enumerate(zip(self.prompts.inputs, token_ids, strict=True)):
            assemblers.append(
                RequestAssembler(
                    self._request(index, ids),
                    params,
                    tokenizer,
                    prompt if isinstance(prompt, str) else None,
                    deltas_only=True,
                    kept_special_token_ids=self.prompts.kept_special_token_ids,
                )
            )
            yield
        check_prompt_logprobs([assembler.request for assembler in assemblers])
        generation = HTTPGeneration(self.service, assemblers, params, self.caller)
        generation.held_images = self.prompts.images
        return generation

    def _request(self, index: int, token_ids: list[int]) -> Request:
        with blamed_on("prompt"):
            request = self.inputs.make_request(
                f"{self.caller.call_id}-{index}",
                token_ids,
                self.params.sampling,
                seed=self.service.seeds.draw(self.options.tenant),
                options=self.options,
                beams=self.params.beams,
                grammar=self.grammar,
                adapter=self.adapter,
            )
            request = self.inputs.with_images(request, self.prompts.images_of(index))
        return self.inputs.with_prediction(request, self.prompts.prediction_token_ids)


@contextmanager
def fields_named(names: Mapping[str, str]) -> Iterator[None]:
    """Rename the fields in errors that are raised inside. `names` maps the names of fields to the
    API's names.

    An error about a part of a field ("structured_outputs.json") becomes an error about the field,
    and its message begins with the new name.
    """
    try:
        yield
    except InvalidRequestError as error:
        given = error.param
        if given:
            whole = given.partition(".")[0]
            error.param = names.get(given) or names.get(whole, given)
            if error.param not in (given, whole) and str(error).startswith(given):
                error.args = (str(error).replace(given, error.param, 1), *error.args[1:])
        raise


@contextmanager
def blamed_on(param: str) -> Iterator[None]:
    """Set `param` as the field of errors that are raised inside without a field."""
    try:
        yield
    except InvalidRequestError as error:
        error.param = error.param or param
        raise


def new_call_id(prefix: str) -> str:
    """An id that no other call has, in OpenAI's form."""
    return f"{prefix}-{uuid.uuid4().hex}"
