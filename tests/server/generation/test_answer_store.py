"""Answers are kept within the bound, for their tenant alone."""

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st
from tests.server.working import finished

from quire.errors import InvalidRequestError
from quire.server.generation import answer_store
from quire.server.generation.answer_store import AnswerStore, Owner, StoredAnswer, StoredItems

ROOM = 10_000


def answer(name, previous=None, size=0):
    items = [{"id": f"item_{name}", "text": "x" * size}]
    kept = StoredItems(json.dumps(items).encode(), (f"item_{name}",))
    return StoredAnswer(name, b"{}", kept, StoredItems(), previous)


def history(store, owner, name):
    return finished(store.history(owner, name))[0]


def test_nothing_is_kept_without_room():
    store = AnswerStore()
    store.store(Owner(""), answer("a"))
    assert not store.is_on and store.find(Owner(""), "a") is None and len(store) == 0


def test_a_history_is_all_that_came_before():
    store = AnswerStore(ROOM)
    for name, previous in (("a", None), ("b", "a"), ("c", "b"), ("other", None)):
        store.store(Owner(""), answer(name, previous))
    assert [item["id"] for item in history(store, Owner(""), "c")] == ["item_a", "item_b", "item_c"]
    assert store.drop(Owner(""), "a") and not store.drop(Owner(""), "a")
    assert history(store, Owner(""), "c") is None and store.find(Owner(""), "c") is not None


def test_a_history_is_read_in_pieces_and_has_a_bound(monkeypatch):
    store = AnswerStore(ROOM)
    for name, previous in (("a", None), ("b", "a"), ("c", "b")):
        store.store(Owner(""), answer(name, previous, size=1000))
    items, num_pauses = finished(store.history(Owner(""), "c"))
    assert len(items) == num_pauses == 3
    monkeypatch.setattr(answer_store, "MAX_HISTORY_BYTES", 3000)
    assert len(history(store, Owner(""), "b")) == 2
    with pytest.raises(InvalidRequestError, match=r"the conversation up to 'c' has .* begin a new"):
        history(store, Owner(""), "c")


def test_tenants_see_their_own_alone():
    store = AnswerStore(ROOM)
    store.store(Owner("alice"), answer("a"))
    assert store.find(Owner("bob"), "a") is None and not store.items_by_id(Owner("bob"), ["item_a"])
    assert history(store, Owner("bob"), "a") is None and not store.drop(Owner("bob"), "a")
    item = {"id": "item_a", "text": ""}
    assert store.items_by_id(Owner("alice"), ["item_a", "item_b"]) == {"item_a": item}


def test_the_one_used_least_recently_goes_first():
    store = AnswerStore(ROOM)
    for name in "abc":
        store.store(Owner(""), answer(name, size=2000))
    assert history(store, Owner(""), "a") is not None  # used now
    store.store(Owner(""), answer("d", size=2000))
    assert [store.find(Owner(""), name) is not None for name in "abcd"] == [True, False, True, True]
    assert not store.items_by_id(Owner(""), ["item_b"])
    store.store(Owner(""), answer("e", size=ROOM))  # larger than all of it
    assert store.find(Owner(""), "e") is None and len(store) == 3


def test_no_tenant_pushes_out_anothers():
    store = AnswerStore(ROOM)
    store.store(Owner("alice"), answer("a", size=8000))
    for name in "bcdef":
        store.store(Owner("bob"), answer(name, size=8000))
    assert store.find(Owner("alice"), "a") is not None
    assert [store.find(Owner("bob"), name) is not None for name in "bcdef"] == [False] * 4 + [True]


def test_callers_without_keys_see_their_own_alone_and_share_one_room():
    store = AnswerStore(ROOM)
    first, second = Owner("", "first"), Owner("", "second")
    store.store(first, answer("a", size=3000))
    store.store(second, answer("b", size=3000))
    for owner, name in ((second, "a"), (Owner(""), "a"), (first, "b")):
        assert store.find(owner, name) is None and history(store, owner, name) is None
        assert not store.items_by_id(owner, [f"item_{name}"]) and not store.drop(owner, name)
    store.store(second, answer("c", size=3000))
    assert store.find(first, "a") is None and store.find(second, "b") is not None
    assert store.num_bytes("") <= ROOM


@given(st.lists(st.tuples(st.sampled_from("AB"), st.integers(0, 5), st.integers(-1, 9000))))
def test_it_never_holds_more_than_its_bound(steps):
    store = AnswerStore(ROOM)
    for tenant, number, size in steps:
        if size < 0:
            store.drop(Owner(tenant), str(number))
        else:
            store.store(Owner(tenant), answer(str(number), size=size))
        held = [store.find(Owner(of), str(name)) for of in "AB" for name in range(6)]
        for of, first in (("A", 0), ("B", 6)):
            kept = [each.num_bytes for each in held[first : first + 6] if each]
            assert store.num_bytes(of) == sum(kept) <= ROOM
        for of in "AB":
            for name in range(6):
                is_there = store.find(Owner(of), str(name)) is not None
                assert bool(store.items_by_id(Owner(of), [f"item_{name}"])) == is_there
