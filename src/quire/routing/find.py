"""Finds a routing policy by its name."""

import inspect
from collections.abc import Callable, Mapping

from quire.errors import ConfigurationError, did_you_mean
from quire.routing.policies.expected_ttft import ExpectedTTFT
from quire.routing.policies.least_work import LeastWork
from quire.routing.policies.llm_d import LlmD
from quire.routing.policies.longest_match import LongestMatch
from quire.routing.policies.random_choice import RandomChoice
from quire.routing.policies.round_robin import RoundRobin
from quire.routing.policies.sglang import SGLang
from quire.routing.policy import RoutingPolicy

DEFAULT_ROUTING_POLICY = "expected_ttft"

ROUTING_POLICIES: dict[str, Callable[..., RoutingPolicy]] = {
    DEFAULT_ROUTING_POLICY: ExpectedTTFT,
    "least_work": LeastWork,
    "random": RandomChoice,
    "round_robin": RoundRobin,
    "longest_match": LongestMatch,
    "sglang": SGLang,
    "llm_d": LlmD,
}


def find_routing_policy(name: str, options: Mapping[str, float] | None = None) -> RoutingPolicy:
    """A new policy of that name.

    `options` are keyword arguments of its constructor. Raises ConfigurationError, with the known
    names, for an unknown name or option.
    """
    if name not in ROUTING_POLICIES:
        known = ", ".join(sorted(ROUTING_POLICIES))
        raise ConfigurationError(
            f"routing_policy is {name!r}, but must be one of {known}"
            f"{did_you_mean(name, ROUTING_POLICIES)}"
        )
    known_options = inspect.signature(ROUTING_POLICIES[name]).parameters
    for option in options or {}:
        if option not in known_options:
            known = ", ".join(known_options) or "none"
            raise ConfigurationError(
                f"routing policy {name!r} has no option {option!r}; its options: {known}"
            )
    return ROUTING_POLICIES[name](**(options or {}))
