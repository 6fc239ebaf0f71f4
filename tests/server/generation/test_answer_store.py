"""Answers are kept within the bound, for their tenant alone."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.working import finished

from quire.errors import InvalidRequestError
from quire.server.generation import answer_store
from quire.server.generation.answer_store import AnswerStore, StoredAnswer, StoredItems

ROOM = 10_000


def answer(name, previous=None, size=0):
    items = [{"id": f"item_{name}", "text": "x" * size}]
    kept = StoredItems(json.dumps(items).encode(), (f"item_{name}",))
    return StoredAnswer(name, b"{}", kept, StoredItems(), previous)


def history(store, tenant, name):
    return finished(store.history(tenant, name))[0]


def test_nothing_is_kept_without_room():
    store = AnswerStore()
    store.keep("", answer("a"))
    assert not store.is_on and store.find("", "a") is None and len(store) == 0


def test_a_history_is_all_that_came_before():
    store = AnswerStore(ROOM)
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", None)):
        store.keep("", answer(name, previous))
    assert [item["id"] for item in history(store, "", "c")] == ["item_a", "item_b", "item_c"]
    assert store.drop("", "a") and not store.drop("", "a")
    assert history(store, "", "c") is None and store.find("", "c") is not None


def test_a_history_is_read_in_pieces_and_has_a_bound(monkeypatch):
    store = AnswerStore(ROOM)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.keep("", answer(name, previous, size=1000))
    items, num_pauses = finished(store.history("", "c"))
    assert len(items) == num_pauses == 3
    monkeypatch.setattr(answer_store, "MAX_HISTORY_BYTES", 3000)
    assert len(history(store, "", "b")) == 2
    with pytest.raises(InvalidRequestError, match=r"the conversation up to 'c' has .* begin a new"):
        history(store, "", "c")


def test_tenants_see_their_own_alone():
    store = AnswerStore(ROOM)
    store.keep("alice", answer("a"))
    assert store.find("bob", "a") is None and not store.items_by_id("bob", ["item_a"])
    assert history(store, "bob", "a") is None and not store.drop("bob", "a")
    item = {"id": "item_a", "text": ""}
    assert store.items_by_id("alice", ["item_a", "item_b"]) == {"item_a": item}


def test_the_one_used_least_recently_goes_first():
    store = AnswerStore(ROOM)
    for name in "abc":
        store.keep("", answer(name, size=2000))
    assert history(store, "", "a") is not None  # used now
    store.keep("", answer("d", size=2000))
    assert [store.find("", name) is not None for name in "abcd"] == [True, False, True, True]
    assert not store.items_by_id("", ["item_b"])
    store.keep("", answer("e", size=ROOM))  # larger than all of it
    assert store.find("", "e") is None and len(store) == 3


def test_no_tenant_pushes_out_anothers():
    store = AnswerStore(ROOM)
    store.keep("alice", answer("a", size=8000))
    for name in "bcdef":
        store.keep("bob", answer(name, size=8000))
    assert store.find("alice", "a") is not None
    assert [store.find("bob", name) is not None for name in "bcdef"] == [False] * 4 + [True]


@given(st.lists(st.tuples(st.sampled_from("AB"), st.integers(0, 5), st.integers(-1, 9000))))
def test_it_never_holds_more_than_its_bound(steps):
    store = AnswerStore(ROOM)
    for tenant, number, size in steps:
        if size < 0:
            store.drop(tenant, str(number))
        else:
            store.keep(tenant, answer(str(number), size=size))
        held = [store.find(of, str(name)) for of in "AB" for name in range(6)]
        for of, first in (("A", 0), ("B", 6)):
            kept = [each.num_bytes for each in held[first : first + 6] if each]
            assert store.num_bytes(of) == sum(kept) <= ROOM
        for of in "AB":
            for name in range(6):
                is_there = store.find(of, str(name)) is not None
                assert bool(store.items_by_id(of, [f"item_{name}"])) == is_there
