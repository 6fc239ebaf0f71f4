"""Each option that changes logits, alone, against its definition."""

from typing import Any

import numpy as np
import pytest
import torch

from quire.core.sampling_params import DecodingParams
from quire.sampling.host.history import TokenHistory
from quire.sampling.host.processors import (
    AllowedTokens,
    BadWords,
    LogitBias,
    LogitsProcessor,
    MinTokens,
    apply_token_masks,
)

V = 8
INF = float("inf")
CPU = torch.device("cpu")


def processed(
    processor: LogitsProcessor[Any],
    sequences: list[tuple[DecodingParams, list[int], list[int]]],
    rows: list[int] | None = None,
) -> np.ndarray:
    """Logits 0, 1, ... V - 1 of each row after the processor; the input where none is bound."""
    history = TokenHistory(np.zeros((9, 16), np.int32), np.zeros(9, np.int64))
    for row, (params, prompt, output) in enumerate(sequences):
        processor.set_row(row, params, len(prompt))
        tokens = [*prompt, *output]
        history.token_ids[row, : len(tokens)] = tokens
        history.num_tokens[row] = len(tokens)
    chosen = np.array(range(len(sequences)) if rows is None else rows)
    logits = torch.arange(V, dtype=torch.float32).repeat(len(chosen), 1)
    bound = processor.bind(chosen, CPU)
    if bound is not None:
        bound(logits, history)
    return logits.numpy()


def left(line: np.ndarray) -> list[int]:
    """Tokens that are still possible."""
    return np.flatnonzero(line > -INF).tolist()


def params(**options: Any) -> DecodingParams:
    return DecodingParams(max_tokens=8, **options)


@pytest.mark.parametrize(
    "processor",
    [AllowedTokens(), BadWords(V), MinTokens(V), LogitBias()],
    ids=lambda p: type(p).__name__,
)
def test_rows_that_do_not_use_an_option_bind_nothing(processor: LogitsProcessor[Any]) -> None:
    processor.set_row(0, params(), 1)
    assert processor.bind(np.array([0]), CPU) is None
    using = params(
        allowed_token_ids=(1,), bad_words=((1,),), min_tokens=1, end_token_ids=(1,),
        logit_bias=((1, 1.0),),
    )  # fmt: skip
    processor.set_row(1, using, 1)
    assert processor.bind(np.array([0]), CPU) is None
    assert processor.bind(np.array([0, 1]), CPU) is not None
    processor.set_row(1, params(), 1)
    assert processor.bind(np.array([0, 1]), CPU) is None
    processor.set_row(1, using, 1)
    processor.clear_row(1)
    processor.clear_row(1)
    assert processor.bind(np.array([0, 1]), CPU) is None


def test_allowed_tokens_keep_their_logits() -> None:
    sequences = [
        (params(allowed_token_ids=(6, 2, 2)), [1], []),
        (params(), [1], []),
        (params(allowed_token_ids=(0,)), [1], []),
    ]
    lines = processed(AllowedTokens(), sequences, rows=[2, 1, 0])
    assert left(lines[0]) == [0]
    assert left(lines[1]) == list(range(V))
    assert left(lines[2]) == [2, 6]
    assert lines[2, 6] == 6.0


@pytest.mark.parametrize(
    ("words", "prompt", "output", "forbidden"),
    [
        (((3,),), [3], [], [3]),
        (((1, 2, 3),), [7], [1, 2], [3]),
        (((1, 2, 3),), [7], [2, 1, 2], [3]),
        (((1, 2, 3),), [7], [1, 2, 5], []),
        (((1, 2, 3),), [7], [2], []),
        (((1, 2, 3),), [7], [], []),
        # The word began in the prompt: only generated tokens count.
        (((1, 2, 3),), [7, 1], [2], []),
        (((1, 2, 3),), [1, 2], [], []),
        # Words of several lengths together, overlapping ones too.
        (((4,), (2, 5), (1, 2, 6), (0, 2, 7)), [7], [1, 2], [4, 5, 6]),
        (((2, 2),), [7], [2, 2], [2]),
        (((),), [7], [2], []),
    ],
)
def test_bad_words(
    words: tuple[tuple[int, ...], ...], prompt: list[int], output: list[int], forbidden: list[int]
) -> None:
    sequences = [(params(), [0], []), (params(bad_words=words), prompt, output)]
    lines = processed(BadWords(V), sequences)
    assert left(lines[0]) == list(range(V))
    assert left(lines[1]) == [token for token in range(V) if token not in forbidden]


def test_a_bad_word_longer_than_the_row() -> None:
    sequences = [(params(bad_words=((0, 0, 0, 0, 0, 1),)), [0], [0])]
    assert left(processed(BadWords(V), sequences)[0]) == list(range(V))


def test_min_tokens_holds_back_end_and_stop_tokens() -> None:
    ends = {"end_token_ids": (1, 2), "stop_token_ids": (5,)}
    sequences = [
        (params(min_tokens=2, **ends), [0, 0, 0], [3]),
        (params(min_tokens=2, **ends), [0], [3, 3]),
        (params(min_tokens=0, **ends), [0], []),
        (params(min_tokens=3), [0], []),
        (params(min_tokens=1, end_token_ids=(7,)), [0], []),
    ]
    lines = processed(MinTokens(V), sequences)
    assert left(lines[0]) == [0, 3, 4, 6, 7]
    for index in (1, 2, 3):
        assert left(lines[index]) == list(range(V))
    assert left(lines[4]) == list(range(7))


def test_tokens_beyond_the_vocabulary_need_no_holding_back() -> None:
    ends = params(min_tokens=1, end_token_ids=(V, 1), stop_token_ids=(V + 5,))
    assert left(processed(MinTokens(V), [(ends, [0], [])])[0]) == [0, *range(2, V)]
    words = params(bad_words=((V,), (1, V), (V, 1), (3,)))
    assert left(processed(BadWords(V), [(words, [0], [1])])[0]) == [0, 1, 2, *range(4, V)]


def test_logit_bias_adds() -> None:
    sequences = [
        (params(logit_bias=((0, 2.5), (3, -100.0))), [0], []),
        (params(), [0], []),
        (params(logit_bias=((3, 1.0),)), [0], []),
    ]
    lines = processed(LogitBias(), sequences)
    assert lines[0].tolist() == [2.5, 1.0, 2.0, -97.0, 4.0, 5.0, 6.0, 7.0]
    assert lines[1].tolist() == list(range(V))
    assert lines[2, 3] == 4.0


def mask_of(tokens: list[int], num_bytes: int) -> bytes:
    bits = 0
    for token in tokens:
        bits |= 1 << token
    return bits.to_bytes(num_bytes, "little")


def test_masks_follow_the_contract_bit_by_bit() -> None:
    vocab_size = 19
    logits = torch.zeros(3, vocab_size)
    masks = {4: mask_of([0, 7, 8, 18], 3), 9: mask_of([1], 3), 2: mask_of([16], 3)}
    apply_token_masks(logits, np.array([2, 3, 4]), masks)
    assert left(logits[0].numpy()) == [16]
    assert left(logits[1].numpy()) == list(range(vocab_size))
    assert left(logits[2].numpy()) == [0, 7, 8, 18]


def test_tokens_beyond_a_short_mask_are_not_allowed() -> None:
    logits = torch.zeros(1, 32)
    apply_token_masks(logits, np.array([0]), {0: b"\xff"})
    assert left(logits[0].numpy()) == list(range(8))


def test_masks_of_other_rows_change_nothing() -> None:
    logits = torch.zeros(1, 8)
    apply_token_masks(logits, np.array([0]), {1: b"\x00"})
    assert left(logits[0].numpy()) == list(range(8))
