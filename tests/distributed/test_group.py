"""What ranks say to each other, over gloo in one process."""

import gc

import psutil
import pytest
import torch
from tests.distributed.ranks import run_ranks

from quire.distributed.group import ProcessGroup

DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_sum_and_gather(size: int) -> None:
    def work(group: ProcessGroup) -> list[tuple[torch.Tensor, torch.Tensor]]:
        values = [torch.full((3, 5), group.rank + 1, dtype=dtype) for dtype in DTYPES]
        return [(group.gather(each), group.sum(each)) for each in values]

    for found in run_ranks(size, work):
        for (parts, total), dtype in zip(found, DTYPES, strict=True):
            assert parts.dtype == total.dtype == dtype
            assert parts.shape == (size, 3, 5) and total.shape == (3, 5)
            assert parts[:, 1, 2].tolist() == list(range(1, size + 1))
            assert (total == size * (size + 1) // 2).all()


def test_views_and_nothing_at_all_can_be_sent() -> None:
    def work(group: ProcessGroup) -> tuple[torch.Tensor, torch.Tensor]:
        table = torch.arange(12).view(3, 4) + 100 * group.rank
        return group.gather(table.T[1:3]), group.sum(torch.zeros(0, 7))

    for parts, nothing in run_ranks(2, work):
        assert parts.tolist() == [[[1, 5, 9], [2, 6, 10]], [[101, 105, 109], [102, 106, 110]]]
        assert nothing.shape == (0, 7)


@pytest.mark.parametrize("num_rows", [1, 2, 7, 64])
def test_a_sum_is_the_same_however_many_elements_there_are_beside_it(num_rows: int) -> None:
    """Three parts added in the order of the ranks: fp32 rounds otherwise in any other."""
    parts = torch.randn(3, 64, 33, generator=torch.Generator().manual_seed(1))
    expected = (parts[0] + parts[1]) + parts[2]
    assert not torch.equal(expected, parts[0] + (parts[1] + parts[2]))
    for total in run_ranks(3, lambda group: group.sum(parts[group.rank, :num_rows].clone())):
        assert torch.equal(total, expected[:num_rows])


def test_least_returns_the_minimum_over_ranks() -> None:
    assert run_ranks(3, lambda group: group.least((7, 5, 2**40)[group.rank])) == [5] * 3


def test_a_rank_that_is_gone_raises_in_the_others() -> None:
    def work(group: ProcessGroup) -> str:
        if group.rank == 1:
            group._backend = None
            gc.collect()  # closes its connections, as the end of its process would
            return ""
        with pytest.raises(RuntimeError) as raised:
            group.sum(torch.zeros(4))
        return str(raised.value)

    assert "127.0.0.1" in run_ranks(2, work)[0]


def test_only_this_machine_may_connect() -> None:
    def work(_group: ProcessGroup) -> set[str]:
        listening = psutil.CONN_LISTEN
        connections = psutil.Process().net_connections()
        return {connection.laddr.ip for connection in connections if connection.status == listening}

    before = {
        connection.laddr.ip
        for connection in psutil.Process().net_connections()
        if connection.status == psutil.CONN_LISTEN
    }
    assert run_ranks(2, work)[0] - before <= {"127.0.0.1"}
