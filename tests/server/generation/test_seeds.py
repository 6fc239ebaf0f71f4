"""Seeds of prompts that bring none: random, or each tenant's own series."""

import random
import threading

from quire.server.generation.seeds import Seeds


def test_without_a_seed_of_the_server_they_are_random_and_of_64_bits():
    first, second = Seeds(), Seeds()
    seeds = [source.draw("") for source in (first, second) for _ in range(50)]
    assert len(set(seeds)) == 100
    assert all(0 <= seed < 2**64 for seed in seeds) and max(seeds) > 2**58


def test_with_one_they_repeat_and_are_all_different():
    first, second, other = Seeds(3), Seeds(3), Seeds(4)
    seeds = [first.draw("alice") for _ in range(50)]
    assert seeds == [second.draw("alice") for _ in range(50)]
    others = [other.draw("alice") for _ in range(50)] + [first.draw("bob") for _ in range(50)]
    assert len({*seeds, *others}) == 150
    assert all(0 <= seed < 2**64 for seed in seeds) and max(seeds) > 2**58


def test_a_tenant_s_seeds_don_t_tell_how_many_the_others_have_drawn():
    alone, crowded = Seeds(0), Seeds(0)
    expected = [alone.draw("bob") for _ in range(20)]
    found = []
    numbers = random.Random(1)
    for _ in range(20):
        for _ in range(numbers.randrange(5)):
            crowded.draw("alice")
        found.append(crowded.draw("bob"))
    assert found == expected


def test_threads_get_each_number_once():
    seeds, found = Seeds(0), [[] for _ in range(4)]

    def draw(into):
        into += [seeds.draw("alice") for _ in range(500)]

    threads = [threading.Thread(target=draw, args=(into,)) for into in found]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    again = Seeds(0)
    assert sorted(seed for each in found for seed in each) == sorted(
        again.draw("alice") for _ in range(2000)
    )
