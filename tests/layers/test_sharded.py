"""One rank's share of single layers, the other ranks made up."""

import torch
from tests.distributed.ranks import LoneGroup, run_ranks
from torch import nn

from quire.distributed.group import ProcessGroup
from quire.formats.dense import DenseMethod
from quire.layers.embedding import LMHead, VocabEmbedding
from quire.layers.linear import Linear, LinearKind, WeightSlot
from quire.layers.sharded import GatheredMethod, Sharding, SummedMethod, vocab_share

CPU = torch.device("cpu")
WHOLE = torch.arange(12 * 8).view(12, 8).float()


def make_linear(
    num_inputs: int, num_outputs: int, kind: LinearKind, *, bias: bool = False
) -> Linear:
    return Linear(num_inputs, (num_outputs,), kind, bias=bias, dtype=torch.float32, device=CPU)


def loaded(share: tuple[int, ...], rank: int, size: int, whole: torch.Tensor) -> torch.Tensor:
    """What a rank's tensor of shape `share` has once `whole` came, in pieces and out of order."""
    target = torch.full(share, -1.0)

    def load(first_row: int, rows: torch.Tensor) -> None:
        target[first_row : first_row + len(rows)] = rows

    cut = Sharding(LoneGroup(rank, size), 100).cut(WeightSlot(share, load), tuple(whole.shape))
    assert cut.shape == whole.shape
    for first in (9, 0, 6, 3):
        if first < len(whole):
            cut.load(first, whole[first : first + 3])
    return target


def test_shares_of_the_vocabulary_cover_it_once() -> None:
    for size in (1, 2, 3, 4, 7):
        for vocab_size in (97, 98, 1013, 1024):
            shares = [vocab_share(vocab_size, rank, size) for rank in range(size)]
            assert [token for share in shares for token in share] == list(range(vocab_size))
            assert len({len(share) for share in shares[:-1]}) <= 1
            assert 0 < len(shares[-1]) <= len(shares[0])


def test_rows_and_columns_are_cut() -> None:
    for rank in range(3):
        assert torch.equal(loaded((4, 8), rank, 3, WHOLE), WHOLE[4 * rank : 4 * rank + 4])
    for rank in range(4):
        assert torch.equal(loaded((12, 2), rank, 4, WHOLE), WHOLE[:, 2 * rank : 2 * rank + 2])
    assert torch.equal(loaded((4,), 1, 3, WHOLE[:, 0]), WHOLE[4:8, 0])


def test_replicated_weights_are_not_cut() -> None:
    assert torch.equal(loaded((12, 8), 2, 3, WHOLE), WHOLE)


def test_the_last_share_of_a_vocabulary_may_be_smaller() -> None:
    whole = WHOLE[:11]
    assert torch.equal(loaded((6, 8), 0, 2, whole), whole[:6])
    assert torch.equal(loaded((5, 8), 1, 2, whole), whole[6:])


def test_ranks_share_a_kv_head_where_there_are_more_of_them() -> None:
    heads = [loaded((6, 8), rank, 4, WHOLE) for rank in range(4)]  # 2 heads of size 6
    assert all(torch.equal(heads[rank], WHOLE[:6]) for rank in (0, 1))
    assert all(torch.equal(heads[rank], WHOLE[6:]) for rank in (2, 3))


def test_each_kind_of_linear_gets_its_method() -> None:
    sharding, inner = Sharding(LoneGroup(0, 2), 100), DenseMethod()
    assert sharding.wrap(make_linear(4, 6, LinearKind.COLUMN), inner) is inner
    assert sharding.wrap(make_linear(4, 6, LinearKind.REPLICATED), inner) is inner
    assert isinstance(sharding.wrap(make_linear(4, 6, LinearKind.ROW), inner), SummedMethod)
    embedding = VocabEmbedding(50, 4, dtype=torch.float32, device=CPU)
    assert isinstance(sharding.wrap(LMHead(embedding, tied=False), inner), GatheredMethod)


def test_a_row_linear_is_summed_with_its_bias_once() -> None:
    torch.manual_seed(0)
    weight, bias, x = torch.randn(6, 8), torch.randn(6), torch.randn(5, 8)

    def work(group: ProcessGroup) -> torch.Tensor:
        columns = slice(4 * group.rank, 4 * group.rank + 4)
        linear = make_linear(4, 6, LinearKind.ROW, bias=True)
        linear.use(Sharding(group, 100).wrap(linear, linear.method), torch.float32, CPU)
        slots = linear.slots()
        slots["weight", 0].load(0, weight[:, columns])
        slots["bias", 0].load(0, bias)
        linear.finish()
        output: torch.Tensor = linear(x[:, columns])
        return output

    first, second = run_ranks(2, work)
    assert torch.equal(first, second)
    torch.testing.assert_close(first, x @ weight.T + bias)


def test_both_ends_of_a_vocabulary_in_unequal_shares() -> None:
    torch.manual_seed(0)
    table, hidden = torch.randn(11, 6), torch.randn(4, 6)
    token_ids = torch.tensor([0, 5, 6, 10, 3])

    def work(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        sharding = Sharding(group, len(table))
        tokens = vocab_share(len(table), group.rank, group.size)
        embedding = VocabEmbedding(len(tokens), 6, dtype=torch.float32, device=CPU)
        head = LMHead(embedding, tied=True)
        head.use(sharding.wrap(head, head.method), torch.float32, CPU)
        sharding.join(nn.ModuleList([embedding, head]))
        assert embedding.weight is not None
        embedding.weight.copy_(table[tokens.start : tokens.stop])
        return embedding(token_ids), head(hidden)

    for rows, logits in run_ranks(2, work):
        assert torch.equal(rows, table[token_ids])
        assert logits.shape == (4, 11) and logits.is_contiguous()
        torch.testing.assert_close(logits, hidden @ table.T)
    assert token_ids.tolist() == [0, 5, 6, 10, 3]
