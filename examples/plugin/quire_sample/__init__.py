"""A plugin of quire: a scheduling policy, a routing policy, an eviction order and an endpoint.

pip install ./examples/plugin
quire serve --scheduling-policy shortest_prompt --eviction freed_first
quire serve --replicas 2 --routing-policy fewest_requests
curl http://127.0.0.1:8000/v1/uptime
"""

from quire.core.memory.eviction import EVICTION_ORDERS, LruOrder
from quire.core.scheduling.policy import POLICIES, Policy, Rank
from quire.core.sequence import Sequence
from quire.routing.candidates import Candidates
from quire.routing.find import ROUTING_POLICIES
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import Replica
from quire.server.endpoint_registry import ENDPOINTS

requires_quire = ">=0.1,<0.2"


class ShortestPrompt(Policy):
    """Short prompts first; a request waits for all that are shorter."""

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        return (sequence.num_prompt_tokens, sequence.arrival_s)


class FewestRequests(RoutingPolicy):
    """The replica with the fewest requests, whatever it has cached."""

    def choose(self, candidates: Candidates) -> Replica:
        return min(candidates.replicas, key=lambda replica: replica.num_requests)


POLICIES.register("shortest_prompt", ShortestPrompt)
ROUTING_POLICIES.register("fewest_requests", FewestRequests)
EVICTION_ORDERS.register("freed_first", LruOrder)
# Only the API server imports the endpoint, and with it the web framework.
ENDPOINTS.register("uptime", "quire_sample.uptime:router")
