"""Sequences for tests of proposers."""

from collections.abc import Sequence as Tokens

from quire.core.sampling_params import DecodingParams
from quire.core.sequence import Sequence, SequenceState


def make_sequence(
    prompt: Tokens[int],
    output: Tokens[int] = (),
    *,
    request_id: str = "a",
    root: bytes = b"",
    prediction: Tokens[int] = (),
) -> Sequence:
    sequence = Sequence(
        request_id, prompt, DecodingParams(1 << 20), chain_root=root, output_token_ids=output
    )
    sequence.prediction_token_ids = prediction
    return sequence


def finish(sequence: Sequence) -> Sequence:
    sequence.move_to(SequenceState.FINISHED)
    return sequence
