"""Small fleets to route to."""

from functools import cache

from quire.core.scheduling.cost_model import StepCostModel, StepLoad, StepSample
from quire.routing.candidates import RoutedRequest
from quire.routing.policy import RoutingPolicy
from quire.routing.replica import ReplicaFacts
from quire.routing.router import ReplicaRouter

BLOCK_SIZE = 16
TOKEN_S = 50e-6


@cache
def cost_model(token_s: float = TOKEN_S) -> StepCostModel:
    """8 ms a step, so much for each token of a prompt, and decodes that are paid by what they
    read."""
    samples = [
        StepSample(StepLoad(rows, pairs), 8e-3 + 2e-5 * rows + 4e-8 * pairs)
        for rows in (1, 8, 64)
        for pairs in (100 * rows, 5000 * rows)
    ]
    samples += [
        StepSample(StepLoad(num_chunk_tokens=size), 8e-3 + token_s * size)
        for size in (16, 64, 256, 1024, 2048)
    ]
    return StepCostModel.fit(samples)


COST_MODEL = cost_model()


def facts(num_blocks: int = 1000, model: StepCostModel = COST_MODEL) -> ReplicaFacts:
    return ReplicaFacts(num_blocks, model, max_num_batched_tokens=2048, max_num_seqs=64)


def make_router(policy: RoutingPolicy, num_replicas: int, num_blocks: int = 1000) -> ReplicaRouter:
    """Replicas r0, r1, ..."""
    router = ReplicaRouter(policy, BLOCK_SIZE)
    for index in range(num_replicas):
        router.add_replica(f"r{index}", facts(num_blocks))
    return router


def make_request(
    request_id: str, family: str, num_blocks: int, num_shared: int = 0
) -> RoutedRequest:
    """A prompt of so many blocks and a token; those of one family are prefixes of each other, and
    the first num_shared blocks are the same in all families."""
    own = f"{family}{num_shared}"
    digests = [
        f"{'' if index < num_shared else own}/{index}".encode() for index in range(num_blocks)
    ]
    return RoutedRequest(request_id, digests, num_blocks * BLOCK_SIZE + 1)
