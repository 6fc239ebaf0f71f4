"""One tenant can't find out, by count or by clock, what another one has in the cache.

Here by what the engine counts, and roughly by the clock; `benchmarks/server/cache_timing.py` has
the samples for statistics.
"""

import asyncio
import random
import statistics
import time

import httpx
import pytest

PREFIX_TOKENS = 800
ALICE, ALICE_TOO, BOB = "alice-key-1", "alice-key-2", "bob-key-1"
SAMPLES = 12


@pytest.fixture
def prompts(guarded):
    """Prompts that were never sent before, once the server has nothing else to do."""
    guarded.wait_until(lambda stats: stats["num_running"] == stats["num_held_blocks"] == 0)
    numbers = random.Random(f"{time.time_ns()}")

    def fresh():
        return [numbers.randrange(300, 4000) for _ in range(PREFIX_TOKENS)]

    return fresh


def body(prompt, **more):
    return {"prompt": prompt, "max_tokens": 1, "ignore_eos": True} | more


def send(guarded, key, prompt, **more):
    """(tokens from the cache, seconds until the first token) of one call."""
    headers = {"Authorization": f"Bearer {key}"}
    started_s = time.perf_counter()
    answer = guarded.http.post("/v1/completions", json=body(prompt, **more), headers=headers)
    seconds = time.perf_counter() - started_s
    usage = answer.raise_for_status().json()["usage"]
    assert usage["prompt_tokens"] == PREFIX_TOKENS
    return usage["prompt_tokens_details"]["cached_tokens"], seconds


def computed(guarded, key, prompt, **more):
    """(tokens from the cache, tokens computed, steps) of a call that is alone."""
    before = guarded.stats()
    cached, _ = send(guarded, key, prompt, **more)
    after = guarded.stats()
    names = ("num_computed_tokens", "num_steps")
    return (cached, *(after[name] - before[name] for name in names))


def test_prefixes_of_another_tenant_save_no_computation(guarded, prompts):
    known, unknown = prompts(), prompts()
    nothing_cached = computed(guarded, ALICE, known)
    assert nothing_cached[0] == 0
    assert computed(guarded, BOB, known) == computed(guarded, BOB, unknown) == nothing_cached
    again = computed(guarded, ALICE_TOO, known)  # her other key: the same tenant
    assert again[0] > 0.9 * PREFIX_TOKENS and again[1] < 0.2 * nothing_cached[1]


def test_prefixes_cached_under_another_salt_save_no_computation(guarded, prompts):
    prompt = prompts()
    assert send(guarded, ALICE, prompt, cache_salt="mine")[0] == 0
    assert send(guarded, ALICE, prompt)[0] == 0
    assert send(guarded, ALICE, prompt, cache_salt="yours")[0] == 0
    assert send(guarded, BOB, prompt, cache_salt="mine")[0] == 0
    assert send(guarded, ALICE, prompt, cache_salt="mine")[0] > 0


def test_prompts_that_another_tenant_is_computing_save_no_computation(guarded, prompts):
    """Of two equal prompts at once the second follows the first, within a tenant."""

    async def at_once(prompt, keys):
        async with httpx.AsyncClient(base_url=guarded.url, timeout=60) as client:
            answers = await asyncio.gather(
                *(
                    client.post(
                        "/v1/completions",
                        json=body(prompt),
                        headers={"Authorization": f"Bearer {key}"},
                    )
                    for key in keys
                )
            )
        usages = [answer.raise_for_status().json()["usage"] for answer in answers]
        return sorted(usage["prompt_tokens_details"]["cached_tokens"] for usage in usages)

    for _ in range(3):
        assert asyncio.run(at_once(prompts(), [ALICE, BOB])) == [0, 0]
    assert asyncio.run(at_once(prompts(), [ALICE, ALICE_TOO]))[1] > 0


@pytest.mark.alone
def test_timing_does_not_reveal_cached_prefix(guarded, prompts):
    """Medians of calls in turns; the control shows that a hit would be seen.

    If a busy machine blurs them, more samples are taken: those of a hit would stay apart.
    """
    times_s = {"same": [], "fresh": [], "own": []}
    for index in range(5 * SAMPLES):
        prompt = prompts()
        send(guarded, ALICE, prompt)
        calls = [("same", BOB, prompt), ("fresh", BOB, prompts()), ("own", ALICE, prompt)]
        random.Random(index).shuffle(calls)
        for name, key, each in calls:
            times_s[name].append(send(guarded, key, each)[1])
        same, fresh, own = (statistics.median(times_s[name]) for name in ("same", "fresh", "own"))
        if index % SAMPLES == SAMPLES - 1 and own < 0.7 * fresh and 0.75 < same / fresh < 1.33:
            break
    assert own < 0.7 * fresh, "a hit saves no time that is measurable here, so this shows nothing"
    assert 0.75 < same / fresh < 1.33
