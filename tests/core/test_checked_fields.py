"""Parameters whose fields are assigned, and wrong names of them."""

from typing import Any

import pytest

from quire.core.sampling_params import BeamSearchParams, SamplingParams
from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError


def test_a_field_that_is_assigned_is_checked_as_when_the_object_is_made() -> None:
    params = SamplingParams()
    for name, good, bad in [
        ("n", 2, 0),
        ("top_p", 0.5, 1.5),
        ("logprobs", -1, "1"),
        ("seed", 1, 0.5),
    ]:
        setattr(params, name, good)
        with pytest.raises(InvalidRequestError, match=f"{name} is {bad!r}, but must be"):
            setattr(params, name, bad)
        assert getattr(params, name) == good
    params.stop = "end"
    assert params.stop == ("end",)
    beams = BeamSearchParams(beam_width=2)
    beams.beam_width = 3
    with pytest.raises(InvalidRequestError, match="beam_width is 0"):
        beams.beam_width = 0
    assert beams.clone() == BeamSearchParams(beam_width=3)


def test_fields_that_are_assigned_one_by_one_are_checked_together_in_a_clone() -> None:
    params = SamplingParams(max_tokens=4)
    params.min_tokens = 5
    with pytest.raises(InvalidRequestError, match="min_tokens is 5, above max_tokens, 4"):
        params.clone()
    params.max_tokens = 6
    assert params.clone() == params


def test_a_clone_shares_nothing_that_could_be_changed() -> None:
    params = SamplingParams(logit_bias={1: 2.0})
    copied = params.clone()
    params.n = 2
    params.logit_bias[3] = 1.0
    assert (copied.n, copied.logit_bias) == (1, {1: 2.0})


@pytest.mark.parametrize(
    ("kind", "table"), [(SamplingParams, "n"), (BeamSearchParams, "beam_width")]
)
def test_names_of_other_engines_are_taken_where_they_ask_for_nothing(kind: Any, table: str) -> None:
    for name, (harmless, why) in kind.foreign.items():
        for value in (None, *harmless):
            params = kind(**{table: 2, name: value})
            setattr(params, name, value)
            assert params == kind(**{table: 2})
        for refused in (lambda: kind(**{table: 2, name: "no"}), lambda: setattr(params, name, 7)):  # noqa: B023
            with pytest.raises(InvalidRequestError, match=f"{name} is .*left out") as caught:
                refused()
            assert str(caught.value).endswith(why) and caught.value.param == name
        with pytest.raises(AttributeError, match=f"has no field {name}: "):
            getattr(params, name)


def test_guided_decoding_is_the_older_name_of_structured_outputs() -> None:
    wish = StructuredOutputsParams(regex="a+")
    params = SamplingParams(guided_decoding=wish)
    assert params == SamplingParams(structured_outputs=wish)
    assert params.guided_decoding is wish
    with pytest.raises(InvalidRequestError, match="structured_outputs is given twice"):
        SamplingParams(guided_decoding=wish, structured_outputs=wish)


def test_the_older_names_of_each_kind_are_understood() -> None:
    for kind, value in {"json": {"type": "null"}, "regex": "a", "choice": ["b"]}.items():
        params = SamplingParams(**{f"guided_{kind}": value, "guided_grammar": None})
        assert params == SamplingParams(structured_outputs=StructuredOutputsParams(**{kind: value}))
    with pytest.raises(InvalidRequestError, match="guided_regex is given twice"):
        SamplingParams(guided_json={}, guided_regex="a")  # type: ignore[call-arg]


def test_wrong_arguments_and_fields_are_answered_by_a_sentence() -> None:
    with pytest.raises(InvalidRequestError, match=r"by name, as SamplingParams\(n=1\)"):
        SamplingParams(1)  # type: ignore[misc]
    with pytest.raises(InvalidRequestError, match="BeamSearchParams needs beam_width"):
        BeamSearchParams()  # type: ignore[call-arg]
    with pytest.raises(AttributeError, match="has no field max_token; did you mean max_tokens"):
        SamplingParams().max_token  # noqa: B018
    with pytest.raises(InvalidRequestError, match="has no option max_token; did you mean max_t"):
        SamplingParams().max_token = 3


@pytest.mark.parametrize(
    ("kind", "options", "expected"),
    [
        (
            SamplingParams,
            {"temprature": 1},
            "SamplingParams has no option temprature; did you mean",
        ),
        (SamplingParams, {"n": 1, "xyz": 1}, "SamplingParams has no option xyz$"),
        (BeamSearchParams, {"beam_widht": 2}, "BeamSearchParams has .* did you mean beam_width"),
    ],
)
def test_an_unknown_option_is_refused_with_the_nearest(kind, options, expected) -> None:
    with pytest.raises(InvalidRequestError, match=expected):
        kind(**options)
