"""What a beam search returns, made of a request's outputs."""

import pytest

from quire.core.sampling_params import BeamSearchParams
from quire.engine_client.results import CompletionOutput, RequestOutput
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.offline.beams import BeamSearchSequence, beam_search_output
from quire.text.tokenizer import Tokenizer

PARAMS = BeamSearchParams(beam_width=2, length_penalty=0.5)


def finished(*branches: CompletionOutput, error: str | None = None) -> RequestOutput:
    return RequestOutput("r", None, [7, 8], list(branches), error=error)


def ended(token_ids: list[int], logprob: float | None, reason: str) -> CompletionOutput:
    return CompletionOutput(0, "", token_ids, logprob, finish_reason=reason)


def test_tokens_begin_with_the_prompt_and_scores_count_what_was_generated() -> None:
    output = finished(ended([1, 2, 3, 4], -3.0, "length"), ended([5], -2.0, "stop"))
    result = beam_search_output(output, PARAMS, None)
    assert result.error is None
    assert result.sequences == [
        BeamSearchSequence([7, 8, 1, 2, 3, 4], "", -3.0, -1.5, "length"),
        BeamSearchSequence([7, 8, 5], "", -2.0, -2.0, "stop"),
    ]


def test_a_search_that_failed_has_no_scores_but_says_why() -> None:
    failed = ended([], None, "error")
    result = beam_search_output(finished(failed, failed, error="NaN"), PARAMS, None)
    assert result.error == "NaN"
    assert result.sequences == [BeamSearchSequence([7, 8], "", None, None, "error")] * 2


@pytest.mark.parametrize("reason", ["stop", "length"])
def test_the_text_is_that_of_all_tokens_without_special_ones(reason: str) -> None:
    tokenizer = Tokenizer.from_folder(EMBEDDED_MODEL)
    prompt, generated = tokenizer.encode("import os"), [*tokenizer.encode(" as o"), 2]
    output = RequestOutput("r", None, prompt, [ended(generated, -1.0, reason)])
    (beam,) = beam_search_output(output, PARAMS, tokenizer).sequences
    assert beam.tokens == [*prompt, *generated]
    assert beam.text == "import os as o"
