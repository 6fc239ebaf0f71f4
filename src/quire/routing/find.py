"""The registry of routing policies."""

from collections.abc import Callable

from quire.registry import Registry
from quire.routing.policies.expected_ttft import ExpectedTTFT
from quire.routing.policies.least_work import LeastWork
from quire.routing.policies.llm_d import LlmD
from quire.routing.policies.longest_match import LongestMatch
from quire.routing.policies.random_choice import RandomChoice
from quire.routing.policies.round_robin import RoundRobin
from quire.routing.policies.sglang import SGLang
from quire.routing.policy import RoutingPolicy

DEFAULT_ROUTING_POLICY = "expected_ttft"

ROUTING_POLICIES: Registry[Callable[..., RoutingPolicy]] = Registry(
    "routing policy",
    {
        DEFAULT_ROUTING_POLICY: ExpectedTTFT,
        "least_work": LeastWork,
        "random": RandomChoice,
        "round_robin": RoundRobin,
        "longest_match": LongestMatch,
        "sglang": SGLang,
        "llm_d": LlmD,
    },
)
