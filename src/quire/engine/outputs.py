"""Sequence outputs -> text and results. No torch: the HTTP front uses it too.

Text is made here, outside the engine, so stop strings are found here too: a branch whose text
contains one is ended at that token, and the caller aborts it in the engine. What the engine
computed beyond that token is dropped; nobody sees it.
"""

from collections.abc import Sequence
from dataclasses import dataclass, field

from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import SamplingParams, Wish, as_sampling_params
from quire.core.step import TokenLogprobs
from quire.text.detokenizer import IncrementalDetokenizer, StopStrings
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Logprob:
    """One token at one position. rank: 1 is the most likely of the vocabulary."""

    logprob: float
    rank: int | None = None
    decoded_token: str | None = None


@dataclass(slots=True)
class CompletionOutput:
    """One branch of a request.

    token_ids: generated tokens, an end token included. logprobs: one map (token id -> Logprob) per
    token, if asked. cumulative_logprob: the sum over the tokens, if logprobs were asked for, and of
    a beam search's results.
    finish_reason: "stop", "length", "abort" or "error"; None while it goes on.
    stop_reason: the stop string or stop token id that ended it; None for the model's end token.
    """

    index: int
    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    cumulative_logprob: float | None = None
    logprobs: list[dict[int, Logprob]] | None = None
    finish_reason: str | None = None
    stop_reason: int | str | None = None

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None


@dataclass(frozen=True, slots=True)
class PrefixMissReport:
    """Why the prefix cache had no more of a prompt; for the operator, not for clients.

    reason: a value of `core.prefix_miss.MissReason`. num_found_tokens: the index of the first token
        that was not found.
    prompt_text, cached_text: where the cache has other tokens: the text around that place in the
        prompt, and in what the cache has. None without a tokenizer.
    evicted_by, evicted_at_s: where it was evicted: for which request, when on the engine's clock.
    """

    reason: str
    num_found_tokens: int
    prompt_text: str | None = None
    cached_text: str | None = None
    evicted_by: str | None = None
    evicted_at_s: float | None = None


@dataclass(slots=True)
class RequestOutput:
    """A request's result. prompt_logprobs: None for the first token, then one map per token.

    error: what ended it, where a branch's finish_reason is "error".
    prefix_miss: of the offline API only, once the request has ended; None without a prefix cache.
    """

    request_id: str
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    num_cached_tokens: int = 0
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    error: str | None = None
    prefix_miss: PrefixMissReport | None = None

    @property
    def finished(self) -> bool:
        return all(output.finished for output in self.outputs)


@dataclass(slots=True)
class Delta:
    """What is new in a branch since the last look."""

    text: str = ""
    token_ids: list[int] = field(default_factory=list)
    logprobs: list[TokenLogprobs] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None


class _Branch:
    """Text and results of one branch."""

    def __init__(
        self, index: int, params: SamplingParams, prompt_ids: Sequence[int], tok: Tokenizer | None
    ) -> None:
        self.output = CompletionOutput(index)
        self.delta = Delta()
        self._params = params
        self._tokenizer = tok
        self._stop = StopStrings(
            tuple(params.stop or ()), include_in_output=params.include_stop_str_in_output
        )
        self._detokenizer = None
        if tok is not None:
            self._detokenizer = IncrementalDetokenizer(
                tok, prompt_ids, skip_special_tokens=params.skip_special_tokens
            )
        if params.logprobs is not None:
            self.output.logprobs = []
            self.output.cumulative_logprob = 0.0

    def push(self, new: SequenceOutput) -> bool:
        """Take new tokens in; returns whether a stop string ended the branch before the engine."""
        last = len(new.token_ids) - 1
        if new.cumulative_logprob is not None:
            self.output.cumulative_logprob = new.cumulative_logprob
        for index, token_id in enumerate(new.token_ids):
            entry = None if new.logprobs is None else new.logprobs[index]
            is_end = index == last and new.finish_reason is FinishReason.STOP
            self._add_token(token_id, entry, hides_text=is_end)
            if self.output.finish_reason is not None:
                return new.finish_reason is None
        if new.finish_reason is not None:
            self._flush()
            if self.output.finish_reason is None:
                self._finish(new.finish_reason.value, new.stop_reason)
        return False

    def _add_token(self, token_id: int, entry: TokenLogprobs | None, *, hides_text: bool) -> None:
        self.output.token_ids.append(token_id)
        self.delta.token_ids.append(token_id)
        if entry is not None:
            self._add_logprobs(entry)
        if self._detokenizer is None:
            return
        if hides_text and not self._params.include_stop_str_in_output:
            return
        armed = len(self.output.token_ids) >= self._params.min_tokens
        self._add_text(self._detokenizer.append(token_id), armed=armed)

    def _add_text(self, piece: str, *, armed: bool) -> None:
        text, matched = self._stop.push(piece, armed=armed)
        self.output.text += text
        self.delta.text += text
        if matched is not None:
            self._finish(FinishReason.STOP.value, matched)

    def _flush(self) -> None:
        """Bring out what the detokenizer and the search for stop strings still hold back."""
        if self._detokenizer is None:
            return
        self._add_text(
            self._detokenizer.finish(), armed=len(self.output.token_ids) >= self._params.min_tokens
        )
        if self.output.finish_reason is None:
            rest = self._stop.finish()
            self.output.text += rest
            self.delta.text += rest

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        self.delta.logprobs.append(entry)
        assert self.output.logprobs is not None and self.output.cumulative_logprob is not None
        self.output.logprobs.append(logprob_map(entry, self._tokenizer))
        self.output.cumulative_logprob += entry.logprob

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.output.finish_reason = self.delta.finish_reason = reason
        self.output.stop_reason = self.delta.stop_reason = stop_reason

    def take_delta(self) -> Delta:
        delta, self.delta = self.delta, Delta()
        return delta

    def abandon(self) -> None:
        """End where it is, if it has not ended."""
        if self.output.finish_reason is None:
            self._finish(FinishReason.ABORT.value, None)

    def inherit(self, parent: CompletionOutput) -> None:
        """Begin with what another branch has so far; stop strings in that do not count."""
        for token_id in parent.token_ids:
            self.output.token_ids.append(token_id)
            if self._detokenizer is not None:
                self._add_text(self._detokenizer.append(token_id), armed=False)
        if self.output.logprobs is not None:
            assert parent.logprobs is not None and parent.cumulative_logprob is not None
            self.output.logprobs += parent.logprobs
            self.output.cumulative_logprob = parent.cumulative_logprob
        self.delta = Delta()


class RequestAssembler:
    """Collects the outputs of one request."""

    def __init__(
        self,
        request: Request,
        wish: Wish,
        tokenizer: Tokenizer | None,
        prompt_text: str | None,
    ) -> None:
        params = as_sampling_params(wish)
        self.request = request
        self._tokenizer = tokenizer
        self._branches = [
            _Branch(index, params, request.prompt_token_ids, tokenizer)
            for index in range(request.n)
        ]
        self.output = RequestOutput(
            request.request_id,
            prompt_text,
            list(request.prompt_token_ids),
            [branch.output for branch in self._branches],
        )

    @property
    def finished(self) -> bool:
        return self.output.finished

    def push(self, new: SequenceOutput) -> list[int]:
        """Take one output in; returns the branches to abort, since a stop string ended them."""
        if new.prompt_logprobs is not None and self.output.prompt_logprobs is None:
            entries = [logprob_map(entry, self._tokenizer) for entry in new.prompt_logprobs]
            self.output.prompt_logprobs = [None, *entries]
        if new.branch_index == 0:
            self.output.num_cached_tokens = new.num_cached_tokens
        if new.error is not None:
            self.output.error = new.error
        branch = self._branches[new.branch_index]
        if branch.output.finished:
            return []
        return [new.branch_index] if branch.push(new) else []

    def abandon(self, branch_index: int) -> None:
        """Nobody waits for a branch any more."""
        self._branches[branch_index].abandon()

    def add_branch(self, parent_index: int, params: SamplingParams) -> int:
        """A new branch, forked from another that goes on; returns its index."""
        index = len(self._branches)
        branch = _Branch(index, params, self.request.prompt_token_ids, self._tokenizer)
        branch.inherit(self._branches[parent_index].output)
        self._branches.append(branch)
        self.output.outputs.append(branch.output)
        return index

    def take_delta(self, branch_index: int) -> Delta:
        """What is new in a branch since the last call."""
        return self._branches[branch_index].take_delta()


def logprob_map(entry: TokenLogprobs, tokenizer: Tokenizer | None) -> dict[int, Logprob]:
    """The likeliest tokens, best first, and the token itself if it is not among them."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id)

    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    found = {
        token_id: Logprob(logprob, rank, text(token_id))
        for rank, (token_id, logprob) in enumerate(top, 1)
    }
    if entry.token_id not in found:
        found[entry.token_id] = Logprob(entry.logprob, entry.rank, text(entry.token_id))
    return found
