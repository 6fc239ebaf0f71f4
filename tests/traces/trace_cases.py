"""Traces that Hypothesis draws."""

from hypothesis import strategies as st

from quire.traces.trace import ENDS, Trace, TraceRequest


@st.composite
def traces(draw: st.DrawFn, block_tokens: int = 8, *, only_prompts: bool = False) -> Trace:
    """Up to 8 requests that share prefixes. only_prompts: with what Mooncake's format holds."""
    ids: dict[tuple[int, ...], int] = {}

    def chain(tenant: int, blocks: list[int]) -> tuple[int, ...]:
        starts = [(tenant, *blocks[: end + 1]) for end in range(len(blocks))]
        return tuple(ids.setdefault(start, len(ids)) for start in starts)

    requests: list[TraceRequest] = []
    at_s = 0.0
    for number in range(draw(st.integers(0, 8))):
        at_s += draw(st.integers(0, 3000)) / 1000
        tenant = 0 if only_prompts else draw(st.integers(0, 1))
        num_tokens = draw(st.integers(0, 40))
        num_full = num_tokens // block_tokens
        blocks = draw(st.lists(st.integers(0, 1), min_size=num_full, max_size=num_full + 2))
        all_ids = chain(tenant, blocks)
        has_parent = not only_prompts and number > 0 and draw(st.booleans())
        requests.append(
            TraceRequest(
                at_s,
                num_tokens,
                draw(st.integers(0, 40)),
                all_ids[:num_full],
                () if only_prompts else all_ids[num_full:],
                tenant,
                draw(st.integers(0, number - 1)) if has_parent else None,
                draw(st.integers(0, 5000)) / 1000 if has_parent else 0.0,
                "length" if only_prompts else draw(st.sampled_from(ENDS)),
            )
        )
    return Trace(block_tokens, tuple(requests))
