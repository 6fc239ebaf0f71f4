"""The law of speculation, in random comparisons: no draft changes a bit of an answer.

    python -m benchmarks.speculation.law --comparisons 20000 --seed 0

Each batch draws a model of some family in some number format, and two crowds of requests. An engine
without drafts, whose memory is large, answers them first. Then engines with other options answer
them with drafts: of real proposers, models and heads, or of liars that know the answers. Requests
arrive at random steps, are forked and aborted; pools are small, prefixes are shared, blocks move to
tiers, and steps fail. A comparison is one request: the tokens, texts, log-probabilities (the
prompt's, too) and reasons of the ends of its branches must be equal. A difference is printed with
the arguments that repeat its batch; the exit code is then 1.
"""

import argparse
import gc
import itertools
import logging
import random
import shutil
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import torch
from tests.engine.tier_law import eager
from transformers.utils.logging import disable_progress_bar

from benchmarks.speculation.law_drafters import with_drafter
from benchmarks.speculation.law_models import MAX_MODEL_LEN, VOCAB_SIZE, draw_served
from benchmarks.speculation.law_requests import Wish, draw_crowd
from benchmarks.speculation.liars import Key, Liar, LyingSampler
from quire import LLM, BeamSearchParams, SamplingParams
from quire.assembly import build
from quire.core.scheduling.pacing import ConstantPacer
from quire.core.scheduling.policy import POLICIES
from quire.engine_client.inputs import read_prompt, with_adapters
from quire.engine_client.outputs import RequestAssembler
from quire.engine_client.results import RequestOutput
from quire.errors import ConfigurationError
from quire.runtime.model_runner import ModelRunner
from quire.simulation.baselines import NoGrowth

NUM_CROWDS, NUM_REQUESTS, NUM_ENGINES = 2, 20, 4
BEAMS = BeamSearchParams(beam_width=3, max_tokens=6)
PROPOSERS = ("ngram", "auto", "ngram,siblings", "history,prediction", "forced,ngram", "siblings")
TIER_OPTIONS = ("cache_dir", "cache_size", "host_cache_size")


class Fork(NamedTuple):
    """A branch that was forked from a running one."""

    #: Index of the request in its crowd.
    index: int
    #: Number of tokens that the first branch had.
    num_tokens: int
    seed: int
    #: The result of the branch.
    found: Any


def seen(output: RequestOutput, num_branches: int) -> Any:
    """All that a client sees of a request's first branches."""
    return (
        output.prompt_logprobs,
        output.error,
        [
            (
                list(branch.token_ids),
                branch.text,
                branch.finish_reason,
                branch.stop_reason,
                branch.logprobs,
                branch.cumulative_logprob,
            )
            for branch in output.outputs[:num_branches]
        ],
    )


class Crowd:
    """Requests, and what an engine without drafts answered."""

    def __init__(self, plain: LLM, wishes: Sequence[Wish]) -> None:
        self.wishes = list(wishes)
        outputs = plain.generate(
            [wish.prompt for wish in wishes],
            [wish.params for wish in wishes],
            use_tqdm=False,
            lora_request=[wish.adapter for wish in wishes] if plain.engine.adapters else None,
        )
        self.expected = [
            seen(output, wish.params.n) for output, wish in zip(outputs, wishes, strict=True)
        ]
        self.answers: dict[Key, list[int]] = {
            (tuple(output.prompt_token_ids), wish.params.seed, index): list(branch.token_ids)
            for output, wish in zip(outputs, wishes, strict=True)
            for index, branch in enumerate(output.outputs)
        }
        # Half of the requests say what they expect, more or less.
        rng = random.Random(len(self.answers))
        for output, wish in zip(outputs, wishes, strict=True):
            tokens = list(output.outputs[0].token_ids)
            if tokens and rng.random() < 0.5:
                at = rng.randrange(len(tokens))
                wish.prompt["prediction"] = tokens[:at] + tokens[at + rng.randrange(3) :] or tokens


class Batch:
    """A model, its crowds, and the engines that answer them with drafts."""

    def __init__(self, seed: int, index: int, folder: Path, name: str | None) -> None:
        self.rng = random.Random(f"batch {index} of {seed}")
        self.served = with_drafter(self.rng, draw_served(self.rng, folder, name), folder)
        self.folder = folder
        self.plain = self._open(enable_prefix_caching=False, num_blocks=512)
        if self.plain.engine.facts["kernels"] == "torch":
            raise SystemExit("torch's products have other bits in other steps; compile the kernels")
        self.crowds = [
            Crowd(self.plain, draw_crowd(self.rng, NUM_REQUESTS, self.served.adapters))
            for _ in range(NUM_CROWDS)
        ]
        self.counts: Counter[str] = Counter()
        self.differences: list[str] = []

    def run(self) -> None:
        """Compare all crowds on all engines."""
        for _ in range(NUM_ENGINES):
            options = self._draw_options()
            with self._engine(options) as llm:
                order = [*self.crowds, self.rng.choice(self.crowds)]
                for crowd in order:
                    self._compare(llm, crowd, options)
                self._count(llm)

    def _open(self, **options: Any) -> LLM:
        sizes = {"max_model_len": MAX_MODEL_LEN, "disable_log_stats": True, "speculation": "off"}
        folder = self.served.folder and str(self.served.folder)
        return LLM(folder, **{**sizes, **self.served.options, **options})

    def _draw_options(self) -> dict[str, Any]:
        rng = self.rng
        is_alone = "tensor_parallel_size" not in self.served.options
        max_num_seqs = rng.choice((2, 8, 24, 24))
        options: dict[str, Any] = {
            "speculation": rng.choice(("ngram", *PROPOSERS)),
            "ngram_min_match": rng.choice((1, 1, 2, 3)),
            "num_draft_tokens": rng.choice((1, 2, 3, 7, 15)),
            "max_num_seqs": max_num_seqs,
            "max_num_batched_tokens": max(max_num_seqs, rng.choice((16, 24, 48, 2048))),
            "block_size": rng.choice((8, 8, 16, 32, 128)),
            "num_blocks": rng.choice(("tight", "tight", 512)),
            "scheduling_policy": rng.choice(sorted(POLICIES)),
            "enable_prefix_caching": rng.random() < 0.8,
            "num_lookahead_blocks": rng.choice((0, 1, 4)),
            "max_itl_ratio": rng.choice((0, 0, 0, 0, 2.0)),
        }
        if self.served.drafter and rng.random() < 0.8:
            method = self.served.drafter["speculation"]
            names = (method, f"ngram,{method}", f"forced,siblings,{method}")
            options |= {**self.served.drafter, "speculation": rng.choice(names)}
        if not is_alone and options["speculation"] == "auto":
            options["speculation"] = "ngram"  # "auto" drafts only for one native program
        if rng.random() < 0.3:
            options |= {"enable_prefix_caching": True, "num_blocks": "tight"}
            if is_alone and rng.random() < 0.5:
                options["host_cache_size"] = "8MiB"
            else:
                cache = tempfile.mkdtemp(dir=self.folder)
                options |= {"cache_dir": cache, "cache_size": "64MiB"}
        elif is_alone and rng.random() < 0.4:
            options["async_scheduling"] = True
        return options

    @contextmanager
    def _engine(self, options: dict[str, Any]) -> Iterator[LLM]:
        """An engine with drafts. Its pool holds little more than one sequence if it is tight."""
        has_tier = "cache_dir" in options or "host_cache_size" in options
        with mock.patch.object(build, "check_host_tier"), eager():
            given = dict(options)
            if given["num_blocks"] == "tight":
                without = {name: given[name] for name in given if name not in TIER_OPTIONS}
                whole = self._open(**{**without, "num_blocks": 512, "max_itl_ratio": 0})
                growth = whole.engine.scheduler.memory.growth
                share = self.rng.choice((1.1, 1.5, 2.5))
                given["num_blocks"] = int(growth.most_to_hold(MAX_MODEL_LEN) * share) + 1
            llm = self._open(**given)
            scheduler = llm.engine.scheduler
            if options["num_blocks"] == "tight":  # so that sequences are preempted
                scheduler.admission.capacity.forecast.lengths = NoGrowth()
            assert scheduler.drafting is not None
            self.is_lying = self.rng.random() < 0.6
            if not options["max_itl_ratio"] and (self.is_lying or self.rng.random() < 0.7):
                scheduler.pacer = ConstantPacer()  # verifies drafts whatever they cost
            answers = dict(itertools.chain(*(crowd.answers.items() for crowd in self.crowds)))
            if self.is_lying:
                scheduler.drafting.speculator = Liar(self.rng, answers, VOCAB_SIZE)
            if scheduler.drafting.model is not None and self.rng.random() < 0.8:
                self._let_drafter_lie(llm, answers)
            if self.rng.random() < 0.2:
                self._make_steps_fail(llm)
            try:
                yield llm
            finally:
                if has_tier:
                    llm.engine.tier_work.close()
                if "cache_dir" in options:
                    shutil.rmtree(options["cache_dir"])

    def _let_drafter_lie(self, llm: LLM, answers: dict[Key, list[int]]) -> None:
        """Let the drafter know the answers."""
        runner: Any = llm.engine._runner
        while not isinstance(runner, ModelRunner):  # behind a thread, or of several ranks
            runner = runner._runner
        drafter: Any = runner.drafter
        rng = random.Random(self.rng.random())  # a thread draws from it
        drafter._sampler = LyingSampler(drafter._sampler, drafter._rows, answers, rng)
        self.counts["lying drafters"] += 1

    def _make_steps_fail(self, llm: LLM) -> None:
        """Let some of the steps with drafts fail when these are made, or verified."""
        runner: Any = llm.engine._runner
        if not isinstance(runner, ModelRunner):  # behind a thread, or of several ranks
            return

        def now_and_then(method: Callable[..., Any]) -> Callable[..., Any]:
            def call_or_fail(*given: Any) -> Any:
                if self.rng.random() < 0.1:
                    raise RuntimeError("the device failed")
                return method(*given)

            return call_or_fail

        runner.draft = now_and_then(runner.draft)
        runner._verify = now_and_then(runner._verify)

    def _compare(self, llm: LLM, crowd: Crowd, options: dict[str, Any]) -> None:
        """Answer a crowd, and compare."""
        run = _Run(llm, crowd, self.rng)
        run.run()
        for index, output in enumerate(run.outputs):
            wish, expected = crowd.wishes[index], crowd.expected[index]
            found = seen(output, wish.params.n)
            if index in run.aborted:
                found, expected = _shortened(found, expected)
                self.counts["aborted"] += 1
            self._note(found == expected, options, wish, found, expected)
        for fork in run.forks:
            expected = self._forked(crowd.wishes[fork.index], fork)
            self._note(
                fork.found == expected, options, crowd.wishes[fork.index], fork.found, expected
            )
            self.counts["forks"] += 1
        is_roomy = options["num_blocks"] != "tight" and options["max_num_seqs"] >= BEAMS.beam_width
        if is_roomy and self.rng.random() < 0.2:
            prompt = self.rng.choice(crowd.wishes).prompt
            prompt = {name: value for name, value in prompt.items() if name != "prediction"}
            found, expected = (
                [
                    (beam.tokens, beam.cum_logprob)
                    for beam in side.beam_search([prompt], BEAMS, use_tqdm=False)[0].sequences
                ]
                for side in (llm, self.plain)
            )
            self._note(found == expected, options, BEAMS, found, expected)
            self.counts["beam searches"] += 1

    def _note(
        self, is_equal: bool, options: dict[str, Any], wish: object, found: Any, expected: Any
    ) -> None:
        self.counts["comparisons"] += 1
        if not is_equal:
            who = "a liar" if self.is_lying else "proposers"
            self.differences.append(
                f"{self.served}, {options}, {who}:\n  {wish}\n  with drafts: {found}\n"
                f"  without:     {expected}"
            )

    def _forked(self, wish: Wish, fork: Fork) -> Any:
        """The answer of the engine without drafts for a branch forked after as many tokens."""
        assembler = _open(self.plain, wish)
        requests = self.plain._requests
        while len(assembler.output.outputs[0].token_ids) < fork.num_tokens:
            requests.advance()
        index = requests.fork(assembler, 0, _params_of_fork(wish, fork.seed))
        while not assembler.finished:
            requests.advance()
        found = seen(assembler.output, index + 1)[-1][index]
        requests.end_branch(assembler, 0)
        return found

    def _count(self, llm: LLM) -> None:
        stats = llm.engine.stats()
        scheduler = llm.engine.scheduler
        self.counts.update(
            engines=1,
            drafts=stats.num_drafts,
            accepted=stats.num_accepted_drafts,
            preemptions=stats.num_preemptions,
            failed_steps=stats.num_failed_steps,
            hit_tokens=stats.num_hit_tokens,
            steps=stats.num_steps,
        )
        self.counts.update(
            {f"by {name}": sum(each.verified) for name, each in scheduler.drafting.counts.items()}
        )
        if (moves := scheduler.memory.moves) is not None:
            llm.engine.tier_work.drain()  # blocks are held while they are stored
            self.counts["loaded_tokens"] += moves.loads.stats.num_loaded_tokens
        assert llm.engine.stats().num_held_blocks == 0, "a block is lost"


class _Run:
    """A crowd whose requests arrive, are forked and are aborted at random steps."""

    def __init__(self, llm: LLM, crowd: Crowd, rng: random.Random) -> None:
        self.llm, self.crowd, self.rng = llm, crowd, rng
        self.aborted: set[int] = set()
        self.forks: list[Fork] = []
        self.outputs: list[RequestOutput] = []

    def run(self) -> None:
        rng, requests = self.rng, self.llm._requests
        order = list(range(len(self.crowd.wishes)))
        rng.shuffle(order)
        pace = rng.choice((1, 3, len(order)))
        opened: dict[int, RequestAssembler] = {}
        forks: list[tuple[int, int, int, int]] = []
        texts: dict[int, str] = {}
        while order or not all(each.finished for each in opened.values()):
            for index in [order.pop() for _ in range(min(len(order), rng.randint(1, pace)))]:
                opened[index] = _open(self.llm, self.crowd.wishes[index])
            requests.advance()
            index = rng.choice(list(opened))
            first = opened[index].output.outputs[0]
            assert first.text.startswith(texts.get(index, "")), "a stream took text back"
            texts[index] = first.text
            if first.finished or not first.token_ids:
                continue
            is_forked = any(index == fork[0] for fork in forks)
            if index in self.aborted or is_forked:
                continue
            if rng.random() < 0.03:
                seed = rng.getrandbits(30)
                params = _params_of_fork(self.crowd.wishes[index], seed)
                count = len(first.token_ids)
                branch = requests.fork(opened[index], 0, params)
                forks.append((index, count, seed, branch))
            elif rng.random() < 0.01:
                self.aborted.add(index)
                for branch in range(len(opened[index].output.outputs)):
                    requests.end_branch(opened[index], branch)
        self.outputs = [opened[index].output for index in range(len(opened))]
        for index, count, seed, branch in forks:
            found = seen(self.outputs[index], branch + 1)[-1][branch]
            self.forks.append(Fork(index, count, seed, found))
        for assembler in opened.values():
            requests.end_branch(assembler, 0)


def _params_of_fork(wish: Wish, seed: int) -> SamplingParams:
    """The request's options, with a seed of the branch's own."""
    params = wish.params.clone()
    params.n, params.seed, params.prompt_logprobs = 1, seed, None
    return params


def _open(llm: LLM, wish: Wish) -> RequestAssembler:
    """Start a request, and do not wait for it."""
    given = with_adapters([read_prompt(wish.prompt)], wish.adapter)
    group = llm._requests.prepare(given, [wish.params])
    llm._requests.open(group)
    return group.assemblers[0]


def _shortened(found: Any, expected: Any) -> tuple[Any, Any]:
    """Both, cut to the tokens and log-probabilities that an aborted request has got."""

    def cut(branch: Any, count: int) -> Any:
        return branch[0][:count], branch[4] and branch[4][:count]

    counts = [len(branch[0]) for branch in found[-1]]
    return tuple(
        [cut(branch, count) for branch, count in zip(side[-1], counts, strict=True)]
        for side in (found, expected)
    )


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--comparisons", type=int, default=20_000)
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--first-batch", type=int, default=0)
    parser.add_argument("--model", help="of this family alone; 'embedded' for the embedded model")
    wish = parser.parse_args(argv)
    total: Counter[str] = Counter()
    models: Counter[str] = Counter()
    refused: Counter[str] = Counter()
    num_different, began_s = 0, time.perf_counter()
    with tempfile.TemporaryDirectory() as folder:
        for index in itertools.count(wish.first_batch):
            if total["comparisons"] >= wish.comparisons:
                break
            try:
                batch = Batch(wish.seed, index, Path(folder), wish.model)
                batch.run()
            except ConfigurationError as error:  # a format that a family is not served in
                refused[str(error)[:100]] += 1
                continue
            total += batch.counts
            models[batch.served.name] += batch.counts["comparisons"]
            num_different += len(batch.differences)
            for text in batch.differences:
                print(f"--seed {wish.seed} --first-batch {index}: {text}", flush=True)
            rate = total["comparisons"] / (time.perf_counter() - began_s)
            print(
                f"batch {index}: {batch.served}; {total['comparisons']} comparisons,"
                f" {rate:.0f} a second",
                file=sys.stderr,
                flush=True,
            )
            del batch
            gc.collect()
    print(f"{dict(total)}\nmodels: {dict(models)}\nrefused: {dict(refused)}")
    print(f"comparisons that differ: {num_different}")
    return 1 if num_different else 0


if __name__ == "__main__":
    torch.set_num_threads(1)
    logging.disable(logging.ERROR)  # the engine logs each step that is made to fail
    disable_progress_bar()
    sys.exit(main())
