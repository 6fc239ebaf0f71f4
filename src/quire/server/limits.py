"""Bounds of a single call, checked before any tokenization or loop over its fields.

The operator sets the bounds; only the bound of log-probabilities comes from the engine. Values that
are invalid on every server are refused by `core.sampling_params`. Called by `generation` and the
routes; made by `launch`.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import Any, Protocol

from quire.core.request import Request
from quire.core.sampling_checks import MAX_STOP_STRINGS
from quire.core.sampling_params import MAX_BRANCHES
from quire.errors import ConfigurationError, InvalidRequestError, PromptTooLongError
from quire.text.tokenizer import Tokenizer

_COUNTS_OF_LOGPROBS = ("logprobs", "top_logprobs", "prompt_logprobs")

MAX_PROMPT_LOGPROBS = 1_000_000
"""Maximum log-probabilities of prompt tokens in one answer, over all choices: 90 MB of JSON. If
they belong to one prompt, the engine sends one message of 14 MB, written in 0.05 s."""

MAX_ANSWER_BYTES = 384 << 20
"""Maximum bytes of JSON for the log-probabilities of an unstreamed answer of maximum length. Until
the answer is written, the API server holds a seventh to a half of these bytes."""

MAX_TRUNCATED_CHARACTERS = 1 << 20
"""Maximum characters of a text that is to be truncated. All of it is tokenized, which takes 1 to 3
s in a thread."""

MAX_WORD_CHARACTERS = 1000
"""Maximum characters of one of the `bad_words`, each of which is tokenized in several forms."""


class Bounded(Protocol):
    """The fields of a body for generated text that `CallLimits` checks."""

    @property
    def n(self) -> int | None: ...

    @property
    def bad_words(self) -> list[str] | None: ...


@dataclass(frozen=True, slots=True, kw_only=True)
class CallLimits:
    """The bounds of one call, each at least 1.

    Raises ConfigurationError for a bound above what the engine supports.
    """

    #: Maximum number of prompts in one call for completions.
    max_prompts: int = 256
    #: Maximum number of inputs of a call that embeds or scores.
    max_inputs: int = 2048
    #: Maximum number of choices of each prompt.
    max_n: int = 128
    #: Maximum number of choices of all prompts together.
    max_choices: int = 1024
    #: Maximum number of strings in `stop`.
    max_stop_strings: int = 64
    #: Maximum number of entries in each of stop_token_ids, bad_words, allowed_token_ids and
    #: logit_bias.
    max_list_length: int = 4096

    def __post_init__(self) -> None:
        highest = {"max_n": MAX_BRANCHES, "max_stop_strings": MAX_STOP_STRINGS}
        for field in fields(self):
            value, high = getattr(self, field.name), highest.get(field.name)
            if value < 1 or (high is not None and value > high):
                bound = "at least 1" + ("" if high is None else f" and at most {high}")
                raise ConfigurationError(f"{field.name} is {value}, but must be {bound}")

    def check(self, body: Bounded, num_prompts: int, max_logprobs: int) -> None:
        """Check the bounds that `Body.check_fields` and `check_n` do not check.

        `num_prompts` is the number of the body's prompts, `max_logprobs` the engine's bound. Raises
        InvalidRequestError that names the field and the bound.
        """
        self._check_choices(1 if body.n is None else body.n, num_prompts)
        for word in body.bad_words or ():
            if len(word) > MAX_WORD_CHARACTERS:
                raise InvalidRequestError(
                    f"bad_words contains a text of {len(word)} characters, above the bound of"
                    f" {MAX_WORD_CHARACTERS}",
                    "bad_words",
                )
        _check_logprobs(body, max_logprobs)

    def check_n(self, n: int | None) -> None:
        """Raises InvalidRequestError for too many choices of a prompt; an `n` of None means one."""
        if n is not None and n > self.max_n:
            raise InvalidRequestError(
                f"n is {n}, above this server's bound of {self.max_n}; ask for fewer choices", "n"
            )

    def _check_choices(self, n: int, num_prompts: int) -> None:
        if n * num_prompts > self.max_choices:
            raise InvalidRequestError(
                f"n is {n} for each of {num_prompts} prompts, {n * num_prompts} choices, above"
                f" this server's bound of {self.max_choices}; ask for fewer in one call",
                "n",
            )


def too_many_entries(name: str, value: Any, bound: int) -> InvalidRequestError:
    """The error for a field with more entries than the server's bound."""
    return InvalidRequestError(
        f"{name} has {len(value)} entries, above this server's bound of {bound};"
        " send fewer, or several calls",
        name,
    )


def check_text(
    text: str, tokenizer: Tokenizer, max_model_len: int, param: str, *, is_truncated: bool = False
) -> None:
    """Refuse an untokenized text with more characters than max_model_len tokens can have.

    With `is_truncated`, a longer text is accepted, since its tokens are cut afterwards. Its length
    is bounded by MAX_TRUNCATED_CHARACTERS, since all of it is tokenized first. Raises
    PromptTooLongError.
    """
    most = max_model_len * tokenizer.longest_token_bytes
    if len(text) <= (max(most, MAX_TRUNCATED_CHARACTERS) if is_truncated else most):
        return
    if is_truncated:
        raise PromptTooLongError(
            f"the prompt has {len(text)} characters, above the bound of"
            f" {max(most, MAX_TRUNCATED_CHARACTERS)} for a prompt that is to be truncated, all of"
            " which is tokenized first; send a shorter text",
            param,
        )
    raise PromptTooLongError(
        f"the prompt has {len(text)} characters, which can't fit into max_model_len"
        f" ({max_model_len}) tokens; shorten the prompt",
        param,
    )


def check_prompt_logprobs(requests: Sequence[Request]) -> None:
    """Raises InvalidRequestError if the prompts' log-probabilities are too many for one answer."""
    count = sum(
        (1 + request.params.prompt_logprobs) * len(request.prompt_token_ids) * request.n
        for request in requests
        if request.params.prompt_logprobs is not None
    )
    if count > MAX_PROMPT_LOGPROBS:
        raise InvalidRequestError(
            f"the answer would have {count} log-probabilities of prompt tokens, over all choices,"
            f" above the bound of {MAX_PROMPT_LOGPROBS}; send fewer prompts in one call,"
            " or ask for fewer choices or likeliest tokens",
            "prompt_logprobs",
        )


def check_whole_answer(
    requests: Sequence[Request], max_model_len: int, *, bytes_per_logprob: int
) -> None:
    """Raises InvalidRequestError if an unstreamed answer with log-probabilities could be too
    long."""
    count = 0
    for request in requests:
        params = request.params
        if params.logprobs is not None:
            room = max_model_len - len(request.prompt_token_ids)
            num_tokens = 1 + params.logprobs + len(params.logprob_token_ids)
            count += num_tokens * min(params.max_tokens, room) * request.n
    num_bytes = count * bytes_per_logprob
    if num_bytes > MAX_ANSWER_BYTES:
        raise InvalidRequestError(
            f"the answer might have {count} log-probabilities, about {num_bytes >> 20} MiB, above"
            f" the bound of {MAX_ANSWER_BYTES >> 20} MiB; stream it, or lower max_tokens, n or the"
            " number of likeliest tokens",
            "logprobs",
        )


def _check_logprobs(body: Bounded, max_logprobs: int) -> None:
    for name in _COUNTS_OF_LOGPROBS:
        count: Any = getattr(body, name, None)
        if count is None or isinstance(count, bool):  # a boolean in chats
            continue
        # -1 means the whole vocabulary; the engine compares its size with the bound.
        if not -1 <= count <= max_logprobs:
            raise InvalidRequestError(
                f"{name} is {count}, but must be at least 0 and at most {max_logprobs}", name
            )
