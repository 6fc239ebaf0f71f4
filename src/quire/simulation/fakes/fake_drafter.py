"""A fake drafter, which knows the fake model's next tokens, and makes errors at random positions.

Only `fake_runner` uses it.
"""

from collections.abc import Sequence

from quire.core.kv_groups import KVGroup, KVKind
from quire.core.step import Drafted, DraftOrder
from quire.simulation.fakes.fake_model import MASK, FakeModel, branch_salt, extend, mix
from quire.simulation.plan_rows import PlanRow, PlanRows

NO_DRAFTS_SHARE = 8
"""One of this number of rows gets no drafts, as if the drafter lacked K and V of its tokens."""


def check_order(rows: PlanRows, groups: Sequence[KVGroup], order: DraftOrder) -> PlanRow:
    """The row of an order.

    Refuses a row without slots for the drafts. Also refuses a row that lacks more than one token,
    unless the model has recurrent states: such a row may replay tokens to restore its state.
    """
    number, count, most_tokens, _ = order
    refuse = rows.history.refuse
    if number not in rows.live:
        refuse(f"{order} is for a row that is not live", number)
    row = rows.live[number]
    num_lacking = row.num_tokens - row.num_computed
    replays = num_lacking > 1 and any(group.kind is KVKind.STATE for group in groups)
    if row.num_drafts or not (num_lacking == 1 or replays) or most_tokens < 1:
        refuse(f"{order} is for a row that does not decode one token", number)
    for group, table in zip(groups, row.tables, strict=True):
        if group.kind is not KVKind.STATE and len(table) * rows.block_size < row.num_tokens + count:
            refuse(f"{order} has no slots behind {row.num_tokens} tokens", number)
    return row


def fake_drafts(
    model: FakeModel, row: PlanRow, fingerprint: int, order: DraftOrder, error_rate: float
) -> Drafted:
    """The drafts of an order for a row whose tokens have this fingerprint."""
    salt = branch_salt(row.admission.params.seed, row.admission.branch_index)
    draw = mix((fingerprint ^ salt) & MASK)
    num_reached = draw % (row.num_tokens + 1)
    if draw % NO_DRAFTS_SHARE == 0:
        return Drafted((), num_reached)
    found: list[int] = []
    probabilities: list[float] = []
    for _ in range(order.num_drafts):
        is_wrong = mix(fingerprint ^ 1) / 2**64 < error_rate
        found.append((model.next_token(fingerprint, salt, None) + is_wrong) % model.vocab_size)
        fingerprint = extend(fingerprint, found[-1])
        probabilities.append(mix(fingerprint ^ 2) / 2**64)
        if not order.stop.allows_next(found[-1], probabilities):
            break
    return Drafted(tuple(found), num_reached, tuple(probabilities))
