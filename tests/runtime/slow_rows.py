"""A slow model of RowBatch, which makes random plans, and short words for a plan's parts."""

import random

from quire.core.sampling_params import DecodingParams
from quire.core.step import Chunk, EditKind, RowAdmission, RowFork, StepPlan, TableEdit, TokenEdit
from quire.runtime.batch import StepBatch

GREEDY = DecodingParams(max_tokens=8, temperature=0.0)
BLOCK_SIZE = 8
NUM_ROWS = 8


def admit(row: int, token_ids: list[int], *tables: tuple[int, ...], **fields) -> RowAdmission:
    given = {"num_prompt_tokens": len(token_ids), "num_computed_tokens": 0, "params": GREEDY}
    return RowAdmission(row, token_ids, block_tables=tables, **(given | fields))


def slots(table: tuple[int, ...], positions: range) -> list[int]:
    return [table[at // BLOCK_SIZE] * BLOCK_SIZE + at % BLOCK_SIZE for at in positions]


def fork(row: int, source_row: int, joins_step: bool = False) -> RowFork:
    return RowFork(row, source_row, GREEDY, 1, joins_step)


class SlowRows:
    """The rows as lists; makes random plans of all kinds of changes and checks what comes of them.

    Tables always have all 8 blocks, so that they cover whatever is computed.
    """

    def __init__(self, rng: random.Random, decode_share: float = 0.0) -> None:
        """decode_share: of the steps in which no row leads others, so many compute one token of
        each row that has a gap."""
        self.rng = rng
        self.decode_share = decode_share
        self.tokens: dict[int, list[int]] = {}
        self.tables: dict[int, list[list[int]]] = {}
        self.computed: dict[int, int] = {}
        self.most_computed: dict[int, int] = {}
        self.counts: dict[int, int] = {}
        self.joins: dict[int, int] = {}

    def random_plan(self, step_id: int) -> StepPlan:
        release = self.release()
        admissions = self.admit()
        forks = self.fork()
        token_edits = self.edit_tokens()
        table_edits = self.edit_tables()
        self.counts = {}
        only_decodes = self.decode_share > 0 and self.rng.random() < self.decode_share
        for row in sorted(set(self.tokens) - set(self.joins)):
            gap = len(self.tokens[row]) - self.computed[row]
            if row in self.joins.values():
                self.counts[row] = gap
            else:
                self.counts[row] = min(gap, 1) if only_decodes else self.rng.randrange(gap + 1)
        chunks = tuple(Chunk(row, count) for row, count in self.counts.items() if count != 1)
        num_tokens = sum(self.counts.values())
        return StepPlan(
            step_id,
            len(self.tokens),
            num_tokens,
            release,
            admissions,
            forks,
            token_edits,
            table_edits,
            chunks,
        )

    def release(self) -> tuple[int, ...]:
        gone = [r for r, ids in self.tokens.items() if len(ids) > 60 or self.rng.random() < 0.2]
        for row in gone:
            del self.tokens[row], self.tables[row], self.computed[row], self.most_computed[row]
        return tuple(gone)

    def free_rows(self, probability: float) -> list[int]:
        free = sorted(set(range(NUM_ROWS)) - set(self.tokens))
        return [row for row in free if self.rng.random() < probability]

    def admit(self) -> tuple[RowAdmission, ...]:
        admissions = []
        for row in self.free_rows(0.3):
            self.tokens[row] = [self.rng.randrange(1000) for _ in range(self.rng.randrange(1, 40))]
            self.tables[row] = [[self.rng.randrange(100) for _ in range(8)] for _ in range(2)]
            self.computed[row] = self.rng.randrange(len(self.tokens[row]))
            self.most_computed[row] = self.computed[row]
            tables = [tuple(table) for table in self.tables[row]]
            fields = {"num_computed_tokens": self.computed[row]}
            admissions.append(admit(row, list(self.tokens[row]), *tables, **fields))
        return tuple(admissions)

    def fork(self) -> tuple[RowFork, ...]:
        self.joins, forks, sources = {}, [], sorted(self.tokens)
        for row in self.free_rows(0.4) if sources else ():
            source, joins_step = self.rng.choice(sources), self.rng.random() < 0.5
            self.tokens[row] = list(self.tokens[source])
            self.tables[row] = [list(table) for table in self.tables[source]]
            self.computed[row] = self.most_computed[row] = self.computed[source]
            if joins_step:
                self.joins[row] = source
            forks.append(fork(row, source, joins_step))
        return tuple(forks)

    def edit_tokens(self) -> tuple[TokenEdit, ...]:
        edits = []
        for row in sorted(set(self.tokens) - set(self.joins) - set(self.joins.values())):
            if self.rng.random() < 0.3:
                first = self.rng.randint(self.most_computed[row], len(self.tokens[row]))
                new = tuple(self.rng.randrange(1000) for _ in range(self.rng.randint(1, 3)))
                self.tokens[row][first:] = new
                edits.append(TokenEdit(row, first, new))
        return tuple(edits)

    def edit_tables(self) -> tuple[TableEdit, ...]:
        edits = []
        for row in self.tokens:
            group, first = self.rng.randrange(2), self.rng.randrange(8)
            new = tuple(self.rng.randrange(100, 200) for _ in range(8 - first))
            if self.rng.random() < 0.3:
                edits.append(TableEdit(row, group, EditKind.REPLACE, first, new))
                self.tables[row][group][first:] = new
            elif self.rng.random() < 0.3:
                edits.append(TableEdit(row, group, EditKind.TRUNCATE, first))
                edits.append(TableEdit(row, group, EditKind.APPEND, first, new))
                self.tables[row][group][first:] = new
                self.computed[row] = min(self.computed[row], first * BLOCK_SIZE)
        return tuple(edits)

    def check(self, step: StepBatch) -> list[int]:
        """Compare the step with what the lists say; the rows that sample, in order."""
        start, lines = 0, {}
        assert set(step.rows.tolist()) == {row for row, count in self.counts.items() if count}
        at_rows = step.attention.rows
        assert step.rows.tolist() == at_rows.tolist() == step.attention.rows_list
        for number, group in enumerate(step.attention.groups):
            expected = [self.tables[row][number] for row in step.rows.tolist()]
            assert group.block_tables[at_rows].tolist() == expected
        for row in step.rows.tolist():
            positions = range(self.computed[row], self.computed[row] + self.counts[row])
            span = slice(start, start + len(positions))
            assert step.positions[span].tolist() == list(positions)
            assert step.token_ids[span].tolist() == [self.tokens[row][at] for at in positions]
            for group, table in zip(step.attention.groups, self.tables[row], strict=True):
                assert group.slot_mapping[span].tolist() == slots(tuple(table), positions)
            start += len(positions)
            self.computed[row] = positions.stop
            if positions.stop == len(self.tokens[row]):
                lines[row] = start - 1
        order = list(lines)
        assert step.joined_lines.tolist() == [order.index(self.joins[row]) for row in self.joins]
        for row, source in self.joins.items():
            lines[row], self.computed[row] = lines[source], self.computed[source]
        for row, count in self.computed.items():
            self.most_computed[row] = max(self.most_computed[row], count)
        assert step.sample_rows.tolist() == list(lines)
        assert step.sample_index.tolist() == list(lines.values())
        return list(lines)
