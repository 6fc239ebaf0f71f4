"""A scheduling policy of one's own, judged by the simulator before it serves anybody.

The simulator runs the real scheduler and memory on a virtual clock, and checks every token that
its fake model reads back through the block tables.

    python examples/scheduling_policy.py
"""

from quire.core.scheduling.policy import POLICIES, Policy, Rank
from quire.core.sequence import Sequence
from quire.simulation.report import percentile
from quire.simulation.simulator import run
from quire.simulation.workload import SimulationConfig

SECONDS_A_TOKEN = 0.15


class AgedShortestPrompt(Policy):
    """Short prompts first, but a token of prompt weighs only as much as some waiting: none starves.

    The rank is a time: when the sequence came, and how much later its length makes it.
    """

    def rank(self, sequence: Sequence, now_s: float) -> Rank:
        """The smallest goes first."""
        return (sequence.arrival_s + SECONDS_A_TOKEN * sequence.num_prompt_tokens,)


def main() -> None:
    """Compare it with first come, first served, under one load."""
    POLICIES.register("aged_shortest_prompt", AgedShortestPrompt)
    print(f"{'policy':24}{'median':>10}{'p99':>10}{'longest':>10}   wait for the first token")
    for name in ("fcfs", "aged_shortest_prompt"):
        report = run(SimulationConfig(policy=name, num_requests=200, requests_per_s=30, seed=1))
        waits = report.first_token_waits_s
        cells = (percentile(waits, 50), percentile(waits, 99), max(waits))
        print(f"{name:24}" + "".join(f"{cell:8.2f} s" for cell in cells))
    # `LLM(scheduling_policy="aged_shortest_prompt")` obeys it in this process.


if __name__ == "__main__":
    main()
