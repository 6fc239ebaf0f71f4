"""Places requests with a router that sees only salted digests of their tokens.

The digests are made like the prefix digests of the engines' caches. The first digest of a chain
covers the tenant's domain and the adapter. Only this API server knows the salt. So the router's
memory reveals no prompts, and digests of different tenants can't be compared.
"""

import secrets
from collections.abc import Callable, Mapping
from typing import Any

from quire.core.adapters import BASE_MODEL
from quire.core.memory.hash_chain import HashChains
from quire.core.request import Request
from quire.core.sampling_params import ModelLimits
from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.errors import NoReplicaError
from quire.routing.candidates import RoutedRequest
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import ReplicaFacts
from quire.routing.router import ReplicaRouter

SECRET_BYTES = 32

LEAST_BLOCK_TOKENS = 64
"""Minimum number of tokens in a router's block: smaller blocks would cost more time than their
finer prefix matches save."""


class RoutedPlacement:
    """The `Placement` of a fleet, on top of a `ReplicaRouter`."""

    def __init__(self, policy: RoutingPolicy, clock: Callable[[], float]) -> None:
        """`clock` returns seconds from any fixed point."""
        self._policy = policy
        self._clock = clock
        #: None until the first replica is added, since the router needs that replica's block size.
        self._router: ReplicaRouter | None = None
        self._chains = HashChains(b"", 1)

    def add(self, replica: str, limits: ModelLimits, facts: Mapping[str, Any]) -> None:
        """See `Placement`."""
        if self._router is None:
            size = max(LEAST_BLOCK_TOKENS, int(facts["block_size"]))
            self._router = ReplicaRouter(self._policy, size)
            self._chains = HashChains(secrets.token_bytes(SECRET_BYTES), size)
        self._router.add_replica(replica, replica_facts(facts, self._router.block_size))

    def remove(self, replica: str) -> None:
        """See `Placement`."""
        assert self._router is not None, "a replica was added"
        self._router.remove_replica(replica)

    def set_accepting(self, replica: str, accepts: bool) -> None:
        """See `Placement`."""
        assert self._router is not None, "a replica was added"
        self._router.set_accepting(replica, accepts)

    def place(self, request: Request) -> str | None:
        """See `Placement`."""
        if self._router is None:
            return None
        adapter = BASE_MODEL if request.adapter is None else request.adapter.digest
        digests = self._chains.of_prompt(
            request.prompt_token_ids, request.cache_domain, adapter, request.content_spans
        )
        routed = RoutedRequest(
            request.request_id,
            digests,
            len(request.prompt_token_ids),
            request.n,
            tenant=request.tenant,
        )
        try:
            return self._router.place(routed, self._clock())
        except NoReplicaError:
            return None

    def forget_prefixes(self, replica: str) -> None:
        """See `Placement`."""
        assert self._router is not None, "a replica was added"
        self._router.forget_prefixes(replica)

    def set_slowness(self, replica: str, measured: float) -> None:
        """See `Placement`."""
        if self._router is not None and replica in self._router.fleet.by_name:
            self._router.set_slowness(replica, measured, self._clock())

    def load_of(self, replica: str) -> dict[str, float]:
        """See `Placement`."""
        router = self._router
        if router is None or (found := router.fleet.by_name.get(replica)) is None:
            return {}
        return {
            "num_prompts": found.num_prompts,
            "num_uncached_tokens": found.num_uncached_tokens,
            "fill": found.fill,
            "slowness": found.slowness,
            "wait_s": max(0.0, found.wait_s(self._clock())),
        }

    def on_first_token(self, request_id: str) -> None:
        """See `Placement`."""
        if self._router is not None:
            self._router.on_first_token(request_id, self._clock())

    def on_end(self, request_id: str) -> None:
        """See `Placement`."""
        if self._router is not None:
            self._router.on_end(request_id, self._clock())


def replica_facts(facts: Mapping[str, Any], block_size: int) -> ReplicaFacts:
    """Convert the facts that an engine reports to the router's `ReplicaFacts`. `block_size` is the
    number of tokens in a block of the router."""
    num_tokens = int(facts["num_blocks"]) * int(facts["block_size"])
    return ReplicaFacts(
        num_blocks=max(1, num_tokens // block_size),
        cost_model=_cost_model(facts),
        max_num_batched_tokens=int(facts["max_num_batched_tokens"]),
        max_num_seqs=int(facts["max_num_seqs"]),
    )


def _cost_model(facts: Mapping[str, Any]) -> StepCostModel:
    """The step costs that the engine measured at its start. Without a measurement, costs are taken
    as proportional to the number of tokens."""
    coefficients = facts.get("step_costs")
    if coefficients:
        return StepCostModel(list(coefficients))
    return StepCostModel.fit([StepSample(StepLoad(num_chunk_tokens=n), n / 1e3) for n in (1, 1024)])
