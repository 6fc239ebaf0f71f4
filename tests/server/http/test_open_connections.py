"""Which connections are closed for others, and which are refused, on a clock of its own."""

import pytest

from quire.server.http.open_connections import CLOSED_AT_ONCE, LEAST_WAIT_S, OpenConnections


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


class Fake:
    """A connection that ends when it is told to."""

    def __init__(self, book):
        self.book = book
        self.is_closed = False

    def close_idle(self):
        self.is_closed = True
        self.book.remove(self)


class World:
    def __init__(self, **bounds):
        self.clock = Clock()
        self.book = OpenConnections(**bounds, clock=self.clock)

    def open(self, address, number=1):
        """New connections that wait for their first request."""
        found = [Fake(self.book) for _ in range(number)]
        for each in found:
            assert self.book.admit(each, address)
            self.book.record_waiting(each)
        return found

    def pass_time(self):
        self.clock.now_s += LEAST_WAIT_S


def test_connections_are_counted_until_they_end():
    world = World(max_open=2)
    first, second = world.open("10.0.0.1", 2)
    assert (world.book.num_open, world.book.has_room()) == (2, False)
    rooms = []
    world.book.on_room = lambda: rooms.append(world.book.num_open)
    world.book.remove(first)
    world.book.remove(first)
    assert (world.book.num_open, world.book.has_room(), rooms) == (1, True, [1])
    world.book.remove(second)
    assert world.book.num_open == 0


def test_room_is_made_at_the_address_with_most_idle_connections():
    world = World()
    (alone,) = world.open("10.0.0.1")
    crowd = world.open("10.0.0.2", CLOSED_AT_ONCE + 4)
    assert not world.book.make_room()  # all have just come: their requests are on their way
    world.pass_time()
    busy = crowd[0]
    world.book.record_answering(busy)
    assert world.book.make_room()
    assert [each.is_closed for each in crowd] == [False] + [True] * CLOSED_AT_ONCE + [False] * 3
    assert world.book.num_closed_idle == CLOSED_AT_ONCE
    assert not alone.is_closed


def test_bytes_of_a_head_that_does_not_end_make_no_connection_younger():
    world = World()
    (slow,) = world.open("10.0.0.1")
    world.pass_time()
    world.book.record_waiting(slow)
    assert world.book.make_room() and slow.is_closed


def test_an_upload_that_has_stopped_is_closed_after_what_waits_for_a_request():
    world = World()
    stopped, moving, idle = world.open("10.0.0.1", 3)
    for each in (stopped, moving):
        world.book.record_uploading(each)
    world.pass_time()
    world.book.record_uploading(moving)
    assert world.book.make_room() and idle.is_closed
    assert world.book.make_room() and stopped.is_closed
    assert not world.book.make_room() and not moving.is_closed


@pytest.mark.parametrize(
    ("address", "same", "other"),
    [
        ("10.0.0.1", "10.0.0.1", "10.0.0.2"),
        ("2001:db8::1", "2001:db8::ffff:1", "2001:db8:0:1::1"),
        ("::ffff:10.0.0.1", "10.0.0.1", "::ffff:10.0.0.2"),
        ("fe80::1%eth0", "fe80::2%eth0", "fe80:0:0:1::1"),
    ],
)
def test_connections_per_address_are_bounded_and_idle_ones_are_closed_first(address, same, other):
    world = World(max_per_address=2)
    first, second = [*world.open(address), *world.open(same)]
    assert not world.book.admit(Fake(world.book), same)
    assert world.book.num_refused == 1
    world.open(other, 2)
    world.pass_time()
    world.book.record_answering(first)
    assert world.book.admit(Fake(world.book), address)
    assert second.is_closed and not first.is_closed


@pytest.mark.parametrize("address", ["127.0.0.1", "127.8.9.1", "::1", "::ffff:127.0.0.1", ""])
def test_addresses_of_this_machine_have_no_bound_of_their_own(address):
    world = World(max_per_address=1)
    assert len(world.open(address, 5)) == world.book.num_open == 5


def test_a_connection_that_was_never_admitted_changes_nothing():
    world = World()
    stranger = Fake(world.book)
    for note in (
        world.book.record_waiting,
        world.book.record_uploading,
        world.book.record_answering,
    ):
        note(stranger)
    world.book.remove(stranger)
    world.pass_time()
    assert not world.book.make_room() and world.book.num_open == 0
