"""Options that edit logits, by kernels: exactly the pairs that they name, where they are used."""

import numpy as np
import pytest
import torch

pytest.importorskip("triton")

from quire.kernels.triton.sampling import edit_logits

INF = float("inf")


def int32(values: object) -> torch.Tensor:
    return torch.tensor(values, dtype=torch.int32)


@pytest.mark.parametrize("vocab_size", [31, 32, 1100])
def test_only_tokens_whose_bit_is_set_are_left(vocab_size: int) -> None:
    rng = np.random.default_rng(vocab_size)
    is_set = rng.random((2, vocab_size)) < 0.5
    bits = np.zeros((2, -(-vocab_size // 32) * 4), dtype=np.uint8)
    packed = np.packbits(is_set, axis=1, bitorder="little")
    bits[:, : packed.shape[1]] = packed
    lines = [2, 0]
    masks = np.concatenate([np.array(lines, np.int32)[:, None], bits.view(np.int32)], axis=1)
    logits = torch.from_numpy(rng.normal(size=(3, vocab_size)).astype(np.float32))
    expected = logits.clone()
    for line, allowed in zip(lines, is_set, strict=True):
        expected[line, torch.from_numpy(~allowed)] = -INF
    edit_logits.forbid_unset(logits, torch.from_numpy(masks))
    assert torch.equal(logits, expected)


def test_some_tokens_are_forbidden_while_a_line_is_short() -> None:
    logits = torch.zeros((3, 200))[:, :150]  # lines further apart than they are long
    lengths = torch.tensor([4, 5, 6])
    lines, tokens = int32([0, 1, 2, 0]), int32([3, 3, 3, 149])
    edit_logits.forbid_before(logits, lines, tokens, int32([5, 5, 5, 4]), lengths)
    assert logits.nonzero().tolist() == [[0, 3]]
    assert logits[0, 3] == -INF


def test_a_words_last_token_is_forbidden_where_the_others_stand() -> None:
    """Of one token; matching; not matching; begun in the prompt; and two for one token."""
    any_token = edit_logits.ANY_TOKEN
    token_ids = int32([[0, 0, 0, 0, 0, 0], [7, 8, 9, 7, 8, 0]])
    words = edit_logits.Words(
        lines=int32([0] * 6),
        rows=torch.tensor([1] * 6),
        last=int32([1, 2, 3, 4, 5, 5]),
        before=int32(
            [[any_token] * 3, [any_token, 7, 8], [any_token, 8, 7], [9, 7, 8], [9, 7, 8], [8, 8, 8]]
        ),
        min_length=int32([2, 4, 4, 6, 5, 5]),
    )
    logits = torch.zeros((2, 12))
    edit_logits.forbid_words(logits, words, torch.tensor([5, 5]), token_ids)
    assert logits.nonzero().tolist() == [[0, 1], [0, 2], [0, 5]]


def test_more_words_and_pairs_than_one_program_takes() -> None:
    count = 300
    everyone = torch.arange(count, dtype=torch.int32)
    nothing = torch.zeros(count, dtype=torch.int32)
    words = edit_logits.Words(
        nothing, nothing.long(), everyone, torch.empty((count, 0), dtype=torch.int32), nothing
    )
    logits = torch.zeros((1, count + 1))
    edit_logits.forbid_words(logits, words, torch.tensor([0]), int32([[0]]))
    assert torch.isneginf(logits).sum() == count and logits[0, count] == 0
    logits = torch.ones((1, count + 1))
    edit_logits.add_bias(logits, nothing, everyone, everyone.float() / 3)
    assert torch.equal(logits[0, :count], 1 + everyone.float() / 3) and logits[0, count] == 1


def test_a_bias_leaves_the_impossible_so() -> None:
    logits = torch.tensor([[1.0, -INF, 2.5], [0.0, 0.0, 0.0]])
    edit_logits.add_bias(logits, int32([0, 0, 1]), int32([0, 1, 2]), torch.tensor([0.1, 9.0, -4.0]))
    assert torch.equal(logits[0], torch.tensor([1.0 + 0.1, -INF, 2.5]))
    assert logits[1].tolist() == [0.0, 0.0, -4.0]
