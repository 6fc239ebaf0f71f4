"""Framing: what is sent arrives whole, however the bytes arrive, and nothing else is a message."""

import itertools
import socket

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from quire import ipc
from quire.ipc import FrameSplitter, MessageError, PeerGoneError, decoder, encode, receive, send


class Note(msgspec.Struct, tag="note", array_like=True, frozen=True):
    """A message of this test."""

    text: str
    number: int = 0


decode = decoder(Note, "the test")


def test_a_message_beyond_the_bound_is_refused_on_both_ends(monkeypatch):
    frame = encode(Note("y" * 1000))
    monkeypatch.setattr(ipc, "MAX_MESSAGE_BYTES", 999)
    with pytest.raises(MessageError, match="above the bound of 999"):
        encode(Note("y" * 1000))
    with pytest.raises(MessageError, match="above the bound of 999"):
        FrameSplitter().feed(frame[:4])


def test_values_that_msgpack_cannot_carry_are_refused_by_name():
    with pytest.raises(MessageError, match="Note can't be sent"):
        encode(Note("", 2**70))


def test_errors_for_invalid_messages_name_the_sender():
    with pytest.raises(MessageError, match="not a message from the test"):
        decode(b"\x91\xa1x")


@given(
    sizes=st.lists(st.integers(0, 300), max_size=8),
    cuts=st.lists(st.integers(0, 2000), max_size=12),
)
def test_frames_are_found_however_the_bytes_arrive(sizes, cuts):
    sent = [Note("x" * size, size) for size in sizes]
    stream = b"".join(encode(message) for message in sent)
    edges = sorted({0, len(stream), *(cut for cut in cuts if cut < len(stream))})
    splitter = FrameSplitter()
    bodies = []
    for start, end in itertools.pairwise(edges):
        bodies += splitter.feed(stream[start:end])
    assert [decode(body) for body in bodies] == sent


def test_over_a_blocking_socket_messages_arrive_one_by_one_until_its_end():
    ours, theirs = socket.socketpair()
    with ours, theirs:
        send(ours, Note("first"))
        send(ours, Note("second"))
        assert [decode(receive(theirs)) for _ in range(2)] == [Note("first"), Note("second")]
        ours.close()
        with pytest.raises(PeerGoneError):
            receive(theirs)
        with pytest.raises(PeerGoneError):
            send(theirs, Note("late"))
