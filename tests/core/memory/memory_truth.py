"""What the blocks of a memory truly hold, beside what the manager says; used by `memory_world`."""

from dataclasses import dataclass, field

from quire.core.content_spans import ContentSpan
from quire.core.memory.hash_chain import DIGEST_BYTES, hash_block
from quire.core.memory.kv_cache_manager import KVCacheManager
from quire.core.memory.packed_tokens import pack
from quire.core.memory.prefix_cache import PUBLIC_DOMAIN
from quire.core.memory.prefix_index import PrefixMatch
from quire.core.sequence import Sequence
from quire.core.step import HOLE_BLOCK, BlockCopy

DOMAINS = ("a", "b", PUBLIC_DOMAIN)
Tokens = tuple[int | str, ...]  # a position of a content is named by its digest and offset
Place = tuple[int, int]  # the group of a state, and which of its pages


@dataclass
class Step:
    """copies: carried out first. writes, context: blocks that it fills, and that it reads when it
    has; with their group, whose tokens, and how many of them. starts: block -> tokens before the
    first that it writes there. states: pages that it goes on from, their place, whose, from how
    many tokens to how many. ends: each sequence in it, its admissions then, and how many of its
    tokens are written when it has ended."""

    step_id: int
    copies: list[BlockCopy]
    writes: list[tuple[int, int, Sequence, int]] = field(default_factory=list)
    starts: dict[int, int] = field(default_factory=dict)
    context: list[tuple[int, int, Sequence, int]] = field(default_factory=list)
    ends: list[tuple[Sequence, int, int]] = field(default_factory=list)
    states: list[tuple[int, Place, Sequence, int, int]] = field(default_factory=list)

    def touched(self) -> set[int]:
        """All blocks that it reads or writes."""
        touched = {block for copy in self.copies for block in copy}
        touched |= {entry[0] for entry in self.context}
        return touched | {entry[0] for entry in self.states}

    def to_come(self) -> set[int]:
        """All blocks that it writes or copies to."""
        to_come = {copy.target for copy in self.copies}
        to_come |= {entry[0] for entry in self.writes}
        return to_come | {entry[0] for entry in self.states}


class Truth:
    """What blocks and digests truly stand for.

    stored: block -> KV group, and all tokens up to the last one written in it; of a page of a
    state, its place and all tokens of the state. prefixes: digest -> domain, and all tokens up to
    the end of its block.
    """

    def __init__(self, memory: KVCacheManager) -> None:
        self.memory = memory
        self.size = memory.block_size
        self.stored: dict[int, tuple[int | Place, Tokens]] = {}
        self.prefixes: dict[bytes, tuple[str, Tokens]] = {}
        self.roots = {memory.cache.root(domain): domain for domain in DOMAINS}

    def domain(self, sequence: Sequence) -> str:
        return self.roots[sequence.chain_root]

    def begins(self, block: int, group: int, prefix: Tokens) -> bool:
        """Whether a block has these tokens, and maybe more after them."""
        stored = self.stored.get(block)
        if stored is None or stored[0] != group:
            return False
        same_place = (len(stored[1]) - 1) // self.size == (len(prefix) - 1) // self.size
        return same_place and stored[1][: len(prefix)] == prefix

    def note(self, sequence: Sequence, num_tokens: int) -> None:
        """What the digests of its blocks stand for, computed anew."""
        cache, domain, token_ids = self.memory.cache, self.domain(sequence), sequence.token_ids
        chain: list[bytes] = []
        spans, tokens = sequence.content_spans, positions(sequence)
        cache.extend_chain(chain, sequence.chain_root, token_ids[:num_tokens], spans)
        for index, digest in enumerate(chain):
            self.prefixes[digest] = domain, tokens[: (index + 1) * self.size]
        packed = pack(token_ids, len(chain) * self.size, num_tokens, spans)
        if packed:
            digest = hash_block(chain[-1] if chain else sequence.chain_root, packed)
            self.prefixes[digest] = domain, tokens[:num_tokens]

    def carry_out(self, step: Step) -> None:
        """Copies, writes, and then every context is read."""
        copied = [(copy.target, self.stored.get(copy.source)) for copy in step.copies]
        for target, content in copied:
            assert content is not None, "a copy of nothing"
            self.stored[target] = content
        for block, group, sequence, end in step.writes:
            self.stored[block] = group, positions(sequence)[:end]
        for block, group, sequence, end in step.context:
            prefix = positions(sequence)[:end]
            assert self.begins(block, group, prefix) or sequence.is_finished, "a wrong token"
        for page, place, sequence, start, end in step.states:
            before = place, positions(sequence)[:start]
            is_right = not start or self.stored.get(page) == before
            assert is_right or sequence.is_finished, "a wrong state"
            self.stored[page] = place, positions(sequence)[:end]

    def holds(self, block: int, key: tuple[int, bytes]) -> bool:
        """Whether a findable block has what it is found by."""
        group, name = key
        prefix = self.prefixes[name[:DIGEST_BYTES]][1]
        if self.memory.growth.rules[group].has_slots:
            return self.begins(block, group, prefix)
        place = group, int.from_bytes(name[DIGEST_BYTES:], "big")
        return self.stored.get(block) == (place, prefix)

    def spoil(self, step: Step) -> None:
        """The step failed: what it should have written may be anything."""
        for copy in step.copies:
            self.stored.pop(copy.target, None)
        for page, *_ in step.states:
            self.stored.pop(page, None)
        for block, start in step.starts.items():
            group, prefix = self.stored.pop(block, (0, ()))
            if start % self.size and prefix:
                self.stored[block] = group, prefix[:start]

    def check_match(self, sequence: Sequence, match: PrefixMatch) -> None:
        """Nothing is matched that is not there, nothing of another domain, and nothing is missed
        (with one group; with more, a partly matching block may be lost in one of them)."""
        memory = self.memory
        assert match.num_tokens < len(sequence.token_ids)
        num_held = sequence.num_computed_tokens
        full, part = divmod(match.num_tokens, self.size)
        if num_held % self.size == 0:
            num_new = full - num_held // self.size
            rules = memory.growth.rules
            assert [len(ids) for ids in match.blocks] == [num_new * r.has_slots for r in rules]
            if match.num_tokens > num_held:
                assert len(match.partial) == len(memory.growth.growing) * (part > 0)
        parent = sequence.parent
        theirs = set() if parent is None else {id for t in parent.block_tables for id in t}
        for block in [*match.copied, *(block for ids in match.blocks for block in ids)]:
            if block not in theirs and block != HOLE_BLOCK:
                key = memory.pool.content[block]
                assert key is not None
                domain = self.prefixes[key[1][:DIGEST_BYTES]][0]
                assert domain in (self.domain(sequence), PUBLIC_DOMAIN)
        if (
            memory.num_groups == 1
            and not memory.growth.bounded
            and not sequence.needs_prompt_logprobs
        ):
            num_findable = self.num_findable_tokens(sequence)
            found = memory.prefixes.match(sequence)  # before a part is left out for want of room
            assert found.num_tokens >= num_findable, f"{found}, but {num_findable} of {sequence}"
            assert match.num_tokens in (found.num_tokens, found.num_confirmed_tokens)

    def num_findable_tokens(self, sequence: Sequence) -> int:
        """The longest prefix that the cache has for it, by a look at each block of it."""
        held, token_ids = sequence.num_computed_tokens, positions(sequence)
        if held % self.size:
            return held
        found = {
            self.prefixes[digest][1]
            for digest in self.memory.cache.entries(0)
            if self.prefixes[digest][0] in (self.domain(sequence), PUBLIC_DOMAIN)
        }
        while held + self.size < len(token_ids) and token_ids[: held + self.size] in found:
            held += self.size
        nexts = [tokens for tokens in found if tokens[:held] == token_ids[:held]]
        agreeing = (
            num_common(tokens, token_ids[:-1])
            for tokens in nexts
            if len(tokens) - held <= self.size
        )
        return max(agreeing, default=held)


def positions(sequence: Sequence) -> Tokens:
    """A name for each position; two names are equal exactly if K and V there are equal."""
    found: list[int | str] = list(sequence.token_ids)
    for first, count, digest, *_ in sequence.content_spans:
        found[first : first + count] = [f"{digest} {offset}" for offset in range(count)]
    return tuple(found)


def make_spans(drawn: list[tuple[int, int, int]], num_tokens: int) -> tuple[ContentSpan, ...]:
    """Spans of a prompt from (gap before it, length, number of its content), as far as they fit."""
    spans: list[ContentSpan] = []
    end = 0
    for gap, count, number in drawn:
        span = ContentSpan(end + gap, count, digest_of(number))
        if span.end >= num_tokens:
            break
        spans.append(span)
        end = span.end
    return tuple(spans)


def digest_of(number: int) -> str:
    """The digest of one of the contents of tests."""
    return f"{number:032x}"


def num_common(first: Tokens, second: Tokens) -> int:
    """How many leading tokens agree."""
    pairs = zip(first, second, strict=False)
    return next(
        (index for index, (a, b) in enumerate(pairs) if a != b), min(len(first), len(second))
    )
