"""Turns outputs of sequences into text and results; no torch.

Text is made here, outside the engine, so stop strings are found here, too. A branch ends at the
token that completes a stop string, and the caller aborts the branch in the engine. Later tokens
from the engine are dropped. The API server and the offline API use this module.
"""

from collections.abc import Sequence
from dataclasses import replace

from quire.core.adapters import LoRARequest
from quire.core.request import FinishReason, Request, SequenceOutput
from quire.core.sampling_params import RequestOutputKind, SamplingParams
from quire.core.step import TokenLogprobs
from quire.engine_client.logprob_entries import LogprobEntries
from quire.engine_client.results import (
    CompletionOutput,
    Delta,
    Logprob,
    RequestMetrics,
    RequestOutput,
)
from quire.text.detokenizer import IncrementalDetokenizer, StopStrings
from quire.text.tokenizer import Tokenizer


class _Branch:
    """Text and results of one branch.

    New pieces of text are collected in lists and joined when they are read, because appending each
    token to a string would copy the whole text each time.
    """

    def __init__(
        self,
        index: int,
        params: SamplingParams,
        prompt_ids: Sequence[int],
        tok: Tokenizer | None,
        *,
        deltas_only: bool,
        kept_special_token_ids: frozenset[int],
    ) -> None:
        #: The result. Texts and log-probabilities that are collected in lists are missing until
        #: `collect_output`.
        self.output = CompletionOutput(index)
        self._params = params
        self._tokenizer = tok
        self._prompt_ids = prompt_ids
        self._kept_special_token_ids = kept_special_token_ids
        #: Made with the first tokens, so that it does not delay the request's way to the engine.
        #: None without a tokenizer.
        self._detokenizer: IncrementalDetokenizer | None = None
        self._deltas_only = deltas_only
        self._stop: StopStrings | None = None
        if params.stop:
            include = params.include_stop_str_in_output
            self._stop = StopStrings(tuple(params.stop), include_in_output=include)
        if params.wants_logprobs:
            self.output.logprobs = None if deltas_only else []
            self.output.cumulative_logprob = 0.0
        # Text pieces that are new since the last `pop_delta`.
        self._new_texts: list[str] = []
        self._new_entries = LogprobEntries()
        self._num_taken_tokens = 0
        self._has_taken_end = False
        # Text pieces that are new since the last `collect_output`.
        self._kept_texts: list[str] = []
        self._kept_entries: list[TokenLogprobs] = []

    def push(self, new: SequenceOutput) -> bool:
        """Append new tokens. Returns whether a stop string ended the branch before the engine
        did."""
        output, detokenizer = self.output, self._detokenizer or self._begin_text()
        if new.cumulative_logprob is not None:
            output.cumulative_logprob = new.cumulative_logprob
        num_shown = len(new.token_ids)
        keeps_end = self._params.include_stop_str_in_output or new.ends_with_text
        if new.finish_reason is FinishReason.STOP and not keeps_end:
            num_shown -= 1  # the end token's text is not part of the answer
        # A stop string ends the loop at its token, so later tokens are dropped.
        for index, token_id in enumerate(new.token_ids):
            output.token_ids.append(token_id)
            if new.logprobs is not None:
                self._add_logprobs(new.logprobs[index])
            if detokenizer is not None and index < num_shown:
                self._add_text(detokenizer.append(token_id))
                if output.finish_reason is not None:
                    return new.finish_reason is None
        # At the engine's end, first release the text that was held back, which may contain a stop
        # string.
        if new.finish_reason is not None:
            self._flush()
            if output.finish_reason is None:
                self._finish(new.finish_reason.value, new.stop_reason)
        return False

    def _begin_text(self) -> IncrementalDetokenizer | None:
        if self._tokenizer is not None:
            self._detokenizer = IncrementalDetokenizer(
                self._tokenizer,
                self._prompt_ids,
                skip_special_tokens=self._params.skip_special_tokens,
                kept_special_token_ids=self._kept_special_token_ids,
            )
        return self._detokenizer

    def _add_text(self, piece: str) -> None:
        if self._stop is None:
            self._emit(piece)
            return
        armed = len(self.output.token_ids) >= self._params.min_tokens
        text, matched = self._stop.push(piece, armed=armed)
        self._emit(text)
        if matched is not None:
            self._finish(FinishReason.STOP.value, matched)

    def _emit(self, text: str) -> None:
        if text:
            self._new_texts.append(text)
            if not self._deltas_only:
                self._kept_texts.append(text)

    def _flush(self) -> None:
        """Append the text that the detokenizer and the search for stop strings still hold back."""
        if self._detokenizer is None:
            return
        self._add_text(self._detokenizer.finish())
        if self._stop is not None and self.output.finish_reason is None:
            self._emit(self._stop.finish())

    def _add_logprobs(self, entry: TokenLogprobs) -> None:
        assert self.output.cumulative_logprob is not None, "log-probabilities come where asked for"
        self.output.cumulative_logprob += entry.logprob
        self._new_entries.append(entry)
        if not self._deltas_only:
            self._kept_entries.append(entry)

    def _finish(self, reason: str, stop_reason: int | str | None) -> None:
        self.output.finish_reason, self.output.stop_reason = reason, stop_reason

    def pop_delta(self) -> Delta:
        output, texts, entries = self.output, self._new_texts, self._new_entries
        delta = Delta(
            texts[0] if len(texts) == 1 else "".join(texts),
            output.token_ids[self._num_taken_tokens :],
            entries,
        )
        self._num_taken_tokens = len(output.token_ids)
        if texts:
            self._new_texts = []
        if entries:
            self._new_entries = LogprobEntries()
        # An error is reported apart from the deltas, by `RequestAssembler.error`.
        has_end = output.finish_reason not in (None, FinishReason.ERROR.value)
        if has_end and not self._has_taken_end:
            self._has_taken_end = True
            delta.finish_reason, delta.stop_reason = output.finish_reason, output.stop_reason
        return delta

    def collect_output(self) -> CompletionOutput:
        """The output with all tokens received so far."""
        if self._kept_texts:
            self.output.text += "".join(self._kept_texts)
            self._kept_texts.clear()
        if self._kept_entries:
            assert self.output.logprobs is not None
            is_ranked = self._params.logprob_token_ids is None
            self.output.logprobs += [
                logprob_map(entry, self._tokenizer, is_ranked=is_ranked)
                for entry in self._kept_entries
            ]
            self._kept_entries.clear()
        return self.output

    def abandon(self) -> None:
        """End the branch now, unless it has ended."""
        if self.output.finish_reason is None:
            self._finish(FinishReason.ABORT.value, None)

    def inherit(self, parent: CompletionOutput) -> None:
        """Start with the output of another branch so far, ignoring stop strings in it."""
        detokenizer = self._begin_text()
        for token_id in parent.token_ids:
            self.output.token_ids.append(token_id)
            if detokenizer is not None:
                piece = detokenizer.append(token_id)
                self._emit(piece if self._stop is None else self._stop.push(piece, armed=False)[0])
        if self.output.logprobs is not None:
            assert parent.logprobs is not None and parent.cumulative_logprob is not None
            self.output.logprobs += parent.logprobs
            self.output.cumulative_logprob = parent.cumulative_logprob
        self._num_taken_tokens = len(self.output.token_ids)
        self._new_texts.clear()


class RequestAssembler:
    """Collects the outputs of one request."""

    def __init__(
        self,
        request: Request,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        prompt_text: str | None,
        *,
        deltas_only: bool = False,
        kept_special_token_ids: frozenset[int] = frozenset(),
        lora_request: LoRARequest | None = None,
    ) -> None:
        """With `deltas_only`, text and log-probabilities of branches are kept only until
        `pop_delta` returns them, and log-probabilities of the prompt are in `prompt_entries`. A
        stream then holds only data that its client has not received yet.

        Special tokens in `kept_special_token_ids` appear in the texts even with
        skip_special_tokens. `lora_request` is copied to the results.
        """
        self._params = params
        self.request = request
        self._tokenizer = tokenizer if params.detokenize else None
        self._deltas_only = deltas_only
        self._kept_special_token_ids = kept_special_token_ids
        self.prompt_entries: LogprobEntries | None = None
        """Entries of all prompt tokens but the first, if requested, from the first output on."""
        self.pooled: bytes | None = None
        """The result of a pooling request; None before it has come."""
        self._knows_cached = False
        self._branches: list[_Branch] = []
        self._output = RequestOutput(
            request.request_id,
            prompt_text,
            list(request.prompt_token_ids),
            [],
            lora_request=lora_request,
        )
        for _ in range(request.n):
            self._add(self._params)

    @property
    def output(self) -> RequestOutput:
        """The results so far."""
        for branch in self._branches:
            branch.collect_output()
        return self._output

    @property
    def metrics(self) -> RequestMetrics | None:
        return self._output.metrics

    @property
    def error(self) -> str | None:
        """The error message of the branch that failed last; None if no branch has failed."""
        return self._output.error

    @property
    def finished(self) -> bool:
        return self._output.finished

    def has_ended(self, branch_index: int) -> bool:
        """Whether a branch has ended."""
        return bool(self._branches[branch_index].output.finished)

    def push(self, new: SequenceOutput) -> list[int]:
        """Append one output. Returns the branches to abort, since a stop string ended them."""
        if new.prompt_logprobs is not None:
            self._store_prompt_logprobs(LogprobEntries.of(new.prompt_logprobs))
        if new.branch_index == 0 and not self._knows_cached:
            # Only the first output counts, because a resumed request finds a different number of
            # cached tokens.
            self._output.num_cached_tokens = new.num_cached_tokens
            self._knows_cached = True
        if new.pooled is not None:
            self.pooled = new.pooled
        branch = self._branches[new.branch_index]
        if branch.output.finished:
            return []
        is_stopped = branch.push(new)
        # If a stop string is found in the tokens before the error, the branch has ended without it.
        if branch.output.finish_reason == FinishReason.ERROR.value:
            self._output.error = new.error
        return [new.branch_index] if is_stopped else []

    def abandon(self, branch_index: int) -> None:
        """End a branch now, since no caller waits for it."""
        self._branches[branch_index].abandon()

    def add_branch(self, parent_index: int, params: SamplingParams) -> int:
        """Fork a new branch from another, which continues. Returns its index."""
        parent = self._branches[parent_index].collect_output()
        branch = self._add(params)
        branch.inherit(parent)
        return branch.output.index

    def pop_delta(self, branch_index: int) -> Delta:
        """The new part of a branch since the last call."""
        return self._branches[branch_index].pop_delta()

    def _store_prompt_logprobs(self, entries: LogprobEntries) -> None:
        """Store the prompt's log-probabilities at the first call. Later calls have no effect, since
        a resumed request sends the same entries again."""
        if self._deltas_only:
            self.prompt_entries = self.prompt_entries or entries
        elif self._output.prompt_logprobs is None:
            maps = [logprob_map(entry, self._tokenizer) for entry in entries]
            self._output.prompt_logprobs = [None, *maps]

    def _add(self, params: SamplingParams) -> _Branch:
        branch = _Branch(
            len(self._branches),
            params,
            self.request.prompt_token_ids,
            self._tokenizer,
            deltas_only=self._deltas_only,
            kept_special_token_ids=self._kept_special_token_ids,
        )
        branch.output.lora_request = self._output.lora_request
        self._branches.append(branch)
        self._output.outputs.append(branch.output)
        return branch


def logprob_map(
    entry: TokenLogprobs, tokenizer: Tokenizer | None, *, is_ranked: bool = True
) -> dict[int, Logprob]:
    """The log-probabilities of one position by token id: the most likely tokens, best first, and
    the position's own token, sampled or from the prompt. If `is_ranked` is False, `entry` has the
    request's `logprob_token_ids` instead of the most likely tokens, and only the position's own
    token has a rank."""

    def text(token_id: int) -> str | None:
        return None if tokenizer is None else tokenizer.token_text(token_id)

    top = zip(entry.top_token_ids, entry.top_logprobs, strict=True)
    found = {
        token_id: Logprob(logprob, rank if is_ranked else None, text(token_id))
        for rank, (token_id, logprob) in enumerate(top, 1)
    }
    if entry.token_id not in found or not is_ranked:
        found[entry.token_id] = Logprob(entry.logprob, entry.rank, text(entry.token_id))
    return found


class OutputSnapshots:
    """Results of a running request, in the form of its `output_kind`. Each result has its own
    copies of the branches' outputs, which the reader may change.

    Invariant: with DELTA, the concatenated pieces are the whole result.
    """

    def __init__(self, assembler: RequestAssembler, kind: RequestOutputKind, name: str) -> None:
        """`name` is the request id that the reader sees."""
        self._assembler = assembler
        self._kind = kind
        self._name = name
        self._num_seen = [(0, False)] * len(assembler.output.outputs)

    def pop_output(self) -> RequestOutput | None:
        """The next result; None if nothing is new, or if FINAL_ONLY waits for the end."""
        output = self._assembler.output
        seen = [(len(each.token_ids), bool(each.finished)) for each in output.outputs]
        is_news = seen != self._num_seen
        if not is_news or (self._kind is RequestOutputKind.FINAL_ONLY and not output.finished):
            return None
        branches = output.outputs
        if self._kind is RequestOutputKind.DELTA:
            branches = [
                self._new_output(each, before[0])
                for each, now, before in zip(branches, seen, self._num_seen, strict=True)
                if now != before
            ]
        else:
            branches = [_copy(each) for each in branches]
        self._num_seen = seen
        return replace(output, request_id=self._name, outputs=branches)

    def _new_output(self, branch: CompletionOutput, num_tokens: int) -> CompletionOutput:
        delta = self._assembler.pop_delta(branch.index)
        logprobs = None if branch.logprobs is None else branch.logprobs[num_tokens:]
        return replace(branch, text=delta.text, token_ids=delta.token_ids, logprobs=logprobs)


def _copy(branch: CompletionOutput) -> CompletionOutput:
    logprobs = None if branch.logprobs is None else list(branch.logprobs)
    return replace(branch, token_ids=list(branch.token_ids), logprobs=logprobs)
