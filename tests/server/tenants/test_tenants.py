"""Tenants get their generations and their tokens a minute, and none gets another's."""

import asyncio
from types import SimpleNamespace

import httpx
import pytest
from starlette.requests import Request as HTTPRequest

from quire.errors import (
    ConfigurationError,
    InvalidRequestError,
    OverloadedError,
    TenantBusyError,
    TokenRateError,
)
from quire.server.generation.http_generation import options_of, tenant_of
from quire.server.tenants.keys import ApiKeys
from quire.server.tenants.tenants import NO_TENANT, Tenant, TenantBook

ALICE, BOB = Tenant("alice"), Tenant("bob")


class Clock:
    now_s = 100.0

    def __call__(self):
        return self.now_s


@pytest.fixture
def clock():
    return Clock()


def test_without_bounds_everything_is_granted_and_counted():
    book = TenantBook()
    leases = [book.open(NO_TENANT, 1000, 10**9) for _ in range(3)]
    for lease in leases:
        lease.count(10**9)
    assert book.num_open() == {"": 3000}
    for lease in leases:
        lease.close()
    assert book.num_open() == {"": 0}


def test_generations_are_bounded_by_tenant():
    book = TenantBook(4)
    first = book.open(ALICE, 3, 10)
    with pytest.raises(TenantBusyError, match=r"'alice' has 3 .* 2 more, but may have 4") as caught:
        book.open(ALICE, 2, 10)
    assert caught.value.retry_after_s >= 1 and isinstance(caught.value, OverloadedError)
    book.open(BOB, 4, 10)
    book.open(ALICE, 1, 10)
    first.close()
    first.close()
    assert book.num_open() == {"alice": 1, "bob": 4}
    book.open(ALICE, 3, 10)
    with pytest.raises(TenantBusyError):
        book.open(ALICE, 1, 10)


def test_where_all_are_one_tenant_no_answer_says_how_many_are_open():
    book, answers = TenantBook(4), set()
    for _ in range(3):
        book.open(NO_TENANT, 1, 10)
        with pytest.raises(TenantBusyError) as caught:
            book.open(NO_TENANT, 4, 10)
        answers.add((str(caught.value), caught.value.retry_after_s))
    assert len(answers) == 1


def test_a_call_that_never_fits_is_no_matter_of_waiting():
    book = TenantBook(4)
    with pytest.raises(InvalidRequestError, match=r"5 generations .* 4 open at once") as caught:
        book.open(ALICE, 5, 10)
    assert caught.value.param == "n"
    assert book.num_open() == {"alice": 0}


def test_prompts_and_answers_use_up_a_minutes_tokens(clock):
    book = TenantBook(max_tokens_per_minute=600, clock=clock)
    book.open(ALICE, 1, 400).count(150)
    with pytest.raises(TokenRateError, match=r"600 tokens per minute; the 100 .* 5 sec") as caught:
        book.open(ALICE, 1, 100)
    assert caught.value.retry_after_s == pytest.approx(5.0)
    book.open(BOB, 1, 600)
    clock.now_s += 5.0
    book.open(ALICE, 1, 100)
    with pytest.raises(TokenRateError):
        book.open(ALICE, 1, 1)
    assert book.num_open() == {"alice": 2, "bob": 1}  # a refusal leaves nothing behind


def test_an_answer_may_leave_a_debt_that_time_pays(clock):
    book = TenantBook(max_tokens_per_minute=60, clock=clock)
    book.open(ALICE, 1, 10).count(170)
    with pytest.raises(TokenRateError) as caught:
        book.open(ALICE, 1, 1)
    assert caught.value.retry_after_s == pytest.approx(121)
    clock.now_s += 120.9
    with pytest.raises(TokenRateError):
        book.open(ALICE, 1, 1)
    clock.now_s += 0.2
    book.open(ALICE, 1, 1)


def test_calls_that_come_together_leave_a_debt(clock):
    """docs/serving.md has this example."""
    book = TenantBook(max_tokens_per_minute=300, clock=clock)
    leases = [book.open(ALICE, 1, 30) for _ in range(4)]
    for lease in leases:
        lease.count(200)
    with pytest.raises(TokenRateError) as caught:
        book.open(ALICE, 1, 30)
    assert caught.value.retry_after_s == pytest.approx(130)
    book.open(BOB, 1, 30)


def test_a_prompt_longer_than_a_minutes_tokens_waits_for_a_full_bucket(clock):
    book = TenantBook(max_tokens_per_minute=60, clock=clock)
    book.open(ALICE, 1, 30)
    with pytest.raises(TokenRateError) as caught:
        book.open(ALICE, 1, 1000)
    assert caught.value.retry_after_s == pytest.approx(30)
    clock.now_s += 30
    book.open(ALICE, 1, 1000)
    with pytest.raises(TokenRateError) as caught:
        book.open(ALICE, 1, 1)
    assert caught.value.retry_after_s == pytest.approx(941)


def test_tokens_are_not_saved_up_beyond_a_minutes(clock):
    book = TenantBook(max_tokens_per_minute=60, clock=clock)
    lease = book.open(ALICE, 1, 60)
    clock.now_s += 3600
    lease.count(50)  # of the full bucket
    book.open(ALICE, 1, 10)
    with pytest.raises(TokenRateError):
        book.open(ALICE, 1, 1)


@pytest.mark.parametrize("name", ["max_requests", "max_tokens_per_minute"])
@pytest.mark.parametrize("bound", [0, -1])
def test_a_bound_is_at_least_one(name, bound):
    option = name.replace("max_", "max_tenant_")
    with pytest.raises(ConfigurationError, match=f"{option} is {bound}, but must be at least 1"):
        TenantBook(**{name: bound})


LONG = {"prompt": "def f(", "max_tokens": 900, "ignore_eos": True, "stream": True}
SHORT = {"prompt": "def g(", "max_tokens": 2}


def headers(key):
    return {"Authorization": f"Bearer {key}"}


def test_a_tenant_at_its_bound_waits_while_others_are_served(guarded):
    """alice may have four generations open; which of her two keys asks makes no difference."""

    async def ask(client, body, key):
        return await client.post("/v1/completions", json=body, headers=headers(key))

    async def run():
        async with (
            httpx.AsyncClient(base_url=guarded.url, timeout=60) as client,
            client.stream(
                "POST", "/v1/completions", json=LONG | {"n": 4}, headers=headers("alice-key-1")
            ) as stream,
        ):
            assert stream.status_code == 200
            refused = await ask(client, SHORT, "alice-key-2")
            others = await asyncio.gather(*(ask(client, SHORT, "bob-key-1") for _ in range(3)))
            models = await client.get("/v1/models", headers=headers("alice-key-2"))
        return refused, others, models

    refused, others, models = asyncio.run(run())
    assert refused.status_code == 429
    error = refused.json()["error"]
    assert (error["type"], error["code"]) == ("rate_limit_error", "tenant_busy")
    assert "'alice' has 4 generations open" in error["message"]
    assert int(refused.headers["retry-after"]) >= 1
    assert [answer.status_code for answer in others] == [200] * 3
    assert models.status_code == 200

    # The client has gone: alice has her places back.
    guarded.wait_until(lambda stats: stats["num_running"] == stats["num_held_blocks"] == 0)
    assert guarded.http.post("/v1/completions", json=SHORT | {"n": 4}).status_code == 200
    never = guarded.http.post("/v1/completions", json=SHORT | {"n": 5})
    assert never.status_code == 400 and never.json()["error"]["param"] == "n"


def request(tenant=None, key=None, **headers):
    """A call as the guard leaves it; key: that came in its header, checked or not."""
    headers = {name.replace("_", "-"): value for name, value in headers.items()}
    if key is not None:
        headers["authorization"] = f"Bearer {key}"
    return HTTPRequest(
        {
            "type": "http",
            "headers": [(name.encode(), value.encode()) for name, value in headers.items()],
            "state": {} if tenant is None else {"tenant": Tenant(tenant)},
        }
    )


def body(priority=0, cache_salt=None, deadline_s=None):
    return SimpleNamespace(priority=priority, cache_salt=cache_salt, deadline_s=deadline_s)


def service(default_deadline_s=None, *, reads_priority=False):
    limits = SimpleNamespace(reads_priority=reads_priority)
    return SimpleNamespace(
        default_deadline_s=default_deadline_s, engine=SimpleNamespace(limits=limits)
    )


def domain(http, salt=None):
    return options_of(http, body(cache_salt=salt), service()).cache_domain


def test_the_tenant_is_whom_the_guard_found():
    assert tenant_of(request("alice")) == Tenant("alice")
    assert tenant_of(request()) == NO_TENANT
    options = options_of(request("alice", key="alice-key-1"), body(priority=2), service())
    assert (options.tenant, options.priority) == ("alice", 2)


@pytest.mark.parametrize(("reads_priority", "expected"), [(True, 12), (False, 2)])
def test_calls_of_batches_have_a_lower_priority_where_the_policy_reads_it(reads_priority, expected):
    http = request("alice")
    http.state.added_priority = 10
    options = options_of(http, body(priority=2), service(reads_priority=reads_priority))
    assert options.priority == expected


@pytest.mark.parametrize(("of_tenant", "of_body"), [(True, True), (True, False), (False, True)])
def test_a_tenant_and_its_calls_may_keep_answers_out_of_the_history(of_tenant, of_body):
    http = request("alice")
    http.state.tenant = Tenant("alice", speculation_history=of_tenant)
    options = options_of(http, body(), service(), speculation_history=of_body)
    assert options.speculation_history == (of_tenant and of_body)


def test_the_cache_is_shared_within_a_tenant_and_a_salt_only():
    first, second = request("alice", key="alice-key-1"), request("alice", key="alice-key-2")
    assert domain(first) == domain(second)
    assert domain(first, "salt") == domain(second, "salt")
    domains = [
        domain(first),
        domain(first, "salt"),
        domain(first, "other"),
        domain(request("bob")),
        domain(request("bob"), "salt"),
        domain(request("")),
    ]
    assert len(set(domains)) == len(domains)


def test_without_keys_what_is_sent_as_one_still_parts_the_cache_but_is_no_tenant():
    senders = [
        request("", key="a"),
        request("", key="b"),
        request("", x_api_key="a"),
        request("", authorization="Basic a"),
        request(""),
    ]
    assert {options_of(http, body(), service()).tenant for http in senders} == {""}
    domains = [domain(http, salt) for http in senders for salt in (None, "salt")]
    assert len(set(domains)) == len(domains)
    assert domain(request("", key="a"), "salt") == domains[1]
    assert not any("Bearer" in each for each in domains)


def test_a_domain_is_the_same_in_every_process():
    """Else a cache on disk would not be found again after a restart."""
    (nameless,) = ApiKeys(["a-key-without-name"]).tenants
    found = [
        domain(request("alice", key="alice-key-1"), "salt"),
        domain(request(nameless.name)),
        domain(request("", key="a"), "salt"),
    ]
    assert found == [
        "5:alicesalt",
        "16:key-3932adf9b3a7",
        "0:5cc475ed863e75e556aa1374a7ab1ce6",
    ]


def test_parts_of_key_and_salt_can_not_be_shifted():
    assert domain(request("", key="a"), "bc") != domain(request("", key="ab"), "c")
    assert domain(request("", authorization="a", x_api_key="b")) != domain(
        request("", authorization="ab")
    )


def test_a_salt_may_be_any_text_of_a_bounded_length():
    assert domain(request("", key="a"), "\ue000 é") != domain(request("", key="a"), "\ue000 è")
    for http in (request("alice"), request("", key="a")):
        with pytest.raises(InvalidRequestError, match="at most 256 characters") as caught:
            options_of(http, body(cache_salt="x" * 257), service())
        assert caught.value.param == "cache_salt"


@pytest.mark.parametrize(
    ("asked", "default", "expected"),
    [(None, None, None), (None, 30.0, 30.0), (5.0, None, 5.0), (60.0, 30.0, 60.0)],
)
def test_a_call_has_its_own_deadline_or_the_servers(asked, default, expected):
    options = options_of(request(), body(deadline_s=asked), service(default))
    assert options.deadline_s == expected


def test_a_call_that_was_not_taken_in_costs_nothing(clock):
    book = TenantBook(4, 600, clock=clock)
    for _ in range(5):
        book.open(ALICE, 4, 500).cancel()
    assert book.num_open() == {"alice": 0}
    book.open(ALICE, 1, 600)
    with pytest.raises(TokenRateError):
        book.open(ALICE, 1, 10)
