"""The store of contents: what it keeps, forgets and encodes again, with a tower of three slices."""

import pytest
import torch
from torch import nn

from quire.core.content_spans import Content
from quire.core.step import ItemLoad
from quire.errors import InvalidRequestError
from quire.models.vision.vision_tower import Grid, Slices, VisionTower
from quire.runtime.batch import ContentPiece
from quire.runtime.contents.content_store import MOST_LOADS, MOST_SLOTS, ContentStore, max_slots

WIDTH = 4
ITEM_BYTES = 2 * WIDTH * 4


class TwoRows(VisionTower):
    """Encodes a content of any values [N] as two rows of their sum; refuses negative values."""

    max_content_tokens = 2

    def __init__(self) -> None:
        nn.Module.__init__(self)
        self.num_slices = 0

    def num_tokens(self, shape: tuple[int, ...], grid: Grid) -> int:
        if len(shape) != 1:
            raise InvalidRequestError("the shape is wrong", "prompt")
        return 2

    def largest_content(self, max_tokens: int) -> tuple[tuple[int, ...], Grid]:
        return (max_tokens,), (1, 1, 1)

    def encode(self, values: torch.Tensor, grid: Grid) -> Slices[torch.Tensor]:
        for _ in range(3):
            self.num_slices += 1
            yield
        if values.min() < 0:
            raise ValueError("a value is negative")
        return values.sum().expand(2, WIDTH).clone()


def content(name: int, *values: float) -> Content:
    given = torch.tensor(values or (float(name),))
    return Content(f"{name:032x}", tuple(given.shape), given.numpy().tobytes())


A, B = content(1), content(2)


@pytest.fixture
def store() -> ContentStore:
    return ContentStore(TwoRows(), num_slots=2, max_cache_bytes=2 * ITEM_BYTES)


def encode(store: ContentStore, *contents: Content) -> None:
    for each in contents:
        assert not store.begin(each.digest)
        while not store.begin(each.digest):
            store.wait()


def rows(store: ContentStore, slot: int, of: Content) -> torch.Tensor:
    store.load([ItemLoad(slot, of.digest)])
    return store.input_embeds([ContentPiece(of.digest, 0, 2, 0)]).rows


def test_contents_are_encoded_one_after_the_other(store: ContentStore) -> None:
    store.open([A, B])
    assert not store.begin(A.digest) and not store.begin(B.digest)
    store.advance(0.0)
    assert store._tower.num_slices == 1, "one slice at least, and no more without time"
    store.advance(60.0)
    assert store.begin(A.digest) and not store.begin(B.digest)
    store.advance(60.0)
    assert store.begin(B.digest)
    assert rows(store, 0, A).eq(1.0).all() and rows(store, 1, B).eq(2.0).all()
    assert store.num_encoded == 2


def test_pieces_say_which_rows_stand_where(store: ContentStore) -> None:
    store.open([A, B])
    encode(store, A, B)
    store.load([ItemLoad(0, A.digest), ItemLoad(1, B.digest)])
    pieces = [ContentPiece(B.digest, 1, 1, 3), ContentPiece(A.digest, 0, 2, 7)]
    embeds = store.input_embeds(pieces)
    assert embeds.places.tolist() == [3, 7, 8]
    assert embeds.rows[:, 0].tolist() == [2.0, 1.0, 1.0]


def test_what_the_cache_has_forgotten_is_encoded_again() -> None:
    store = ContentStore(TwoRows(), num_slots=2, max_cache_bytes=ITEM_BYTES)
    store.open([A, B])
    encode(store, A)
    store.release(A.digest)
    assert store.begin(A.digest), "it is in the cache"
    store.release(A.digest)
    encode(store, B)
    store.release(B.digest)
    assert store.begin(B.digest) and not store.begin(A.digest)
    store.advance(60.0)
    assert store.begin(A.digest), "it is encoded again from its inputs"
    counts = store.counts()
    assert counts.pop("encode_s") > 0.0
    assert counts == {"num_encoded": 3, "num_hits": 2, "cache_bytes": ITEM_BYTES}


def test_embeddings_outlive_their_request_but_inputs_do_not(store: ContentStore) -> None:
    store.open([A])
    encode(store, A)
    store.release(A.digest)
    store.close([A.digest])
    assert not store._inputs
    assert store.begin(A.digest)


def test_embeddings_beyond_the_cache_are_loaded_once() -> None:
    store = ContentStore(TwoRows(), num_slots=2, max_cache_bytes=0)
    store.open([A])
    encode(store, A)
    assert store.counts()["cache_bytes"] == 0
    assert rows(store, 0, A).eq(1.0).all()
    assert not store.begin(A.digest)


def test_a_slot_belongs_to_its_latest_content(store: ContentStore) -> None:
    store.open([A, B])
    encode(store, A, B)
    store.load([ItemLoad(0, A.digest)])
    store.load([ItemLoad(0, B.digest)])
    with pytest.raises(AssertionError, match="not loaded"):
        store.input_embeds([ContentPiece(A.digest, 0, 1, 0)])
    store.reset()
    with pytest.raises(AssertionError, match="not loaded"):
        store.input_embeds([ContentPiece(B.digest, 0, 1, 0)])


def test_a_content_may_move_to_another_slot(store: ContentStore) -> None:
    """Its old slot is filled again afterwards."""
    store.open([A, B])
    encode(store, A, B)
    store.load([ItemLoad(0, A.digest)])
    assert store.begin(A.digest)
    store.load([ItemLoad(1, A.digest)])
    store.load([ItemLoad(0, B.digest)])
    pieces = [ContentPiece(A.digest, 0, 1, 0), ContentPiece(B.digest, 0, 1, 1)]
    assert store.input_embeds(pieces).rows[:, 0].tolist() == [1.0, 2.0]


def test_a_failed_content_is_named_once(store: ContentStore) -> None:
    bad = content(4, -1.0)
    store.open([bad, A])
    assert not store.begin(bad.digest)
    store.advance(60.0)
    assert not store.begin(bad.digest), "it is not tried again until it was reported"
    assert list(store.pop_failed()) == [bad.digest] and not store.pop_failed()
    encode(store, A)


def test_a_tower_that_cannot_be_loaded_is_not_tried_for_ever() -> None:
    num_tried = 0

    def load() -> Slices[VisionTower]:
        nonlocal num_tried
        num_tried += 1
        yield
        raise OSError("the disk is gone")

    store = ContentStore(TwoRows(), num_slots=2, max_cache_bytes=0, load=load)
    reasons = []
    for name in range(MOST_LOADS + 2):
        store.open([content(name)])
        assert not store.begin(content(name).digest)
        store.advance(60.0)
        reasons += store.pop_failed().values()
    assert num_tried == MOST_LOADS
    refused = ["encoder can't be loaded" in reason for reason in reasons]
    assert refused == [True] * MOST_LOADS + [False] * 2
    assert "until the server is restarted" in reasons[-1] and "disk" not in " ".join(reasons)


def test_the_largest_content_leaves_nothing(store: ContentStore) -> None:
    store.encode_largest(5)
    assert store.num_encoded == 0 == store.counts()["cache_bytes"]


def test_a_content_without_requests_is_dropped_from_the_queue(store: ContentStore) -> None:
    store.open([A, B])
    assert not store.begin(A.digest) and not store.begin(B.digest)
    store.close([A.digest, B.digest])
    store.advance(60.0)
    assert store.num_encoded == 0
    # B comes back before its failure was reported, so the new request does not fail.
    store.open([B])
    assert list(store.pop_failed()) == [A.digest]
    encode(store, B)


def test_two_uses_of_one_content(store: ContentStore) -> None:
    store.open([A])
    assert store.check(A) == 2
    with pytest.raises(InvalidRequestError, match="digest"):
        store.check(A._replace(values=B.values))
    with pytest.raises(InvalidRequestError, match="shape"):
        store.check(B._replace(shape=(1, 1)))
    store.open([A])
    store.close([A.digest])
    encode(store, A)
    store.close([A.digest])
    assert not store._inputs


def test_nothing_to_encode_takes_no_time(store: ContentStore) -> None:
    store.advance(60.0)
    store.wait()


@pytest.mark.parametrize(
    ("max_bytes", "content_bytes", "expected"),
    [(1 << 30, 1 << 10, MOST_SLOTS), (1 << 20, 1 << 20, 2), (1 << 20, 1 << 17, 4)],
)
def test_slots_hold_a_half_of_the_memory(max_bytes: int, content_bytes: int, expected: int) -> None:
    assert max_slots(max_bytes, content_bytes) == expected
