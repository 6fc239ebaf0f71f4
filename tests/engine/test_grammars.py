"""Grammars in the loop, without a model: who waits for whom, and how each request ends."""

import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

import pytest
from tests.engine.test_engine import LIMITS, MODEL, make_engine, run, tokens

from quire.core.request import FinishReason, Request, ResumedBranch
from quire.core.sampling_params import DecodingParams
from quire.engine.grammar_work import GrammarWork
from quire.engine.token_masks import GrammarConstraint
from quire.errors import InvalidRequestError
from quire.simulation.fakes.fake_grammar import FakeGrammar, FakeGrammars, constraint_of

VOCABULARY = LIMITS.vocab_size


def request(name: str, grammar: str | None = "3 5 12", n: int = 1, **params: object) -> Request:
    decoding = DecodingParams(**{"max_tokens": 30, "grammar": grammar, **params})
    return Request(name, [1, 2, 3], decoding, n)


def engine_with(grammars: FakeGrammars | None = None, **options: object):
    engine = make_engine()
    source = grammars or FakeGrammars(VOCABULARY)
    engine.grammars = GrammarWork(source, (MODEL.end_token_id,), **options)
    return engine


def expected(wanted: Request, branch: int = 0):
    constraint = constraint_of(wanted, VOCABULARY)
    return MODEL.expected_output(wanted, branch, LIMITS.max_model_len, constraint=constraint)


class Gate(FakeGrammars):
    """Compiles when it is opened."""

    def __init__(self) -> None:
        super().__init__(VOCABULARY)
        self.is_open = threading.Event()
        self.compiled: list[str] = []
        self.domains: list[str] = []

    def compile(self, grammar: str, domain: str = "") -> FakeGrammar:
        assert self.is_open.wait(10)
        self.compiled.append(grammar)
        self.domains.append(domain)
        return super().compile(grammar)


def test_tokens_are_those_of_the_grammar_whatever_runs_beside() -> None:
    requests = [
        request("a", "3 5 12"),
        request("b", None),
        request("c", "5 1 40", n=3),
        request("d", "2 4 4", min_tokens=9),
        request("e", "4 2 50", max_tokens=7),
    ]
    engine = engine_with(num_threads=3)
    for wanted in requests:
        engine.add(wanted)
    found = run(engine)
    for wanted in requests:
        for branch in range(wanted.n):
            outputs = found[wanted.request_id, branch]
            assert tuple(tokens(outputs)) == expected(wanted, branch).token_ids
            assert outputs[-1].finish_reason is expected(wanted, branch).finish_reason


def test_the_end_of_the_grammar_ends_the_answer_before_min_tokens_and_under_ignore_eos() -> None:
    for params in ({"min_tokens": 20}, {"end_token_ids": ()}, {"end_token_ids": (0,)}):
        engine = engine_with()
        engine.add(request("a", "3 4 4", **params))
        outputs = run(engine)["a", 0]
        assert len(tokens(outputs)) == 4, params
        assert 0 not in tokens(outputs)
        assert outputs[-1].finish_reason is FinishReason.STOP


def test_ends_that_are_put_off_come_when_nothing_else_is_left() -> None:
    """1 and 2 are all the tokens that there are beside the end."""
    work = GrammarWork(FakeGrammars(3), (0,))
    compiled = work.compile("1 0 9")
    for params in (DecodingParams(9, min_tokens=2), DecodingParams(9)):
        constraint = work._constraint(compiled, [], params)
        assert constraint.mask() == b"\x06"
    constraint = work._constraint(compiled, [], DecodingParams(9, end_token_ids=(0,)))
    assert constraint.mask() == b"\x07"
    over = work._constraint(work.compile("1 0 0"), [], DecodingParams(9, min_tokens=2))
    assert over.mask() == b"\x01"
    assert over.accept_token(0)


def followed(grammar: str, grammars: FakeGrammars | None = None, **params: object):
    work = GrammarWork(grammars or FakeGrammars(VOCABULARY), (0,))
    return work._constraint(work.compile(grammar), [], DecodingParams(9, **params))


def test_drafts_are_cut_at_the_first_token_that_is_not_allowed_or_ends_the_sequence() -> None:
    """Each token equals the sum of those before modulo 3: 3, 3, 6, 1 is allowed up to the 1."""
    cut = [followed("3 2 9").allowed_prefix(drafts) for drafts in ((), (3, 3, 6, 1), (1,))]
    assert cut == [0, 3, 0]
    assert followed("3 2 9").allowed_prefix((3, 3, 0, 3)) == 2  # 0 is an end token
    assert followed("3 2 3").allowed_prefix((3, 3, 3)) == 2  # the third completes it
    slow = followed("3 2 9")
    slow._is_slow = True
    assert slow.allowed_prefix((3, 3)) == 0


def test_masks_behind_drafts_are_those_of_the_tokens() -> None:
    """With min_tokens 3, the end may come after the third token."""
    drafts = (3, 6, 9)
    masks = followed("3 2 9", min_tokens=3, end_token_ids=(0,)).masks(drafts)
    follows = followed("3 2 9", min_tokens=3, end_token_ids=(0,))
    expected = [follows.mask()]
    for token_id in drafts:
        assert not follows.accept_token(token_id)
        expected.append(follows.mask())
    assert list(masks) == expected
    assert [mask[0] & 1 for mask in masks] == [0, 0, 0, 1]


class Bounded:
    """A grammar that allows all tokens, and has no mask after `bad`."""

    is_finished = False

    def __init__(self, bad: tuple[int, ...], token_ids: tuple[int, ...] = ()) -> None:
        self.bad, self.token_ids = bad, token_ids

    def consume(self, token_ids: Sequence[int]) -> None:
        self.token_ids += tuple(token_ids)

    def mask(self) -> bytes:
        if self.token_ids == self.bad:
            raise ValueError("too complex")
        return b"\xff" * 4

    def copy(self) -> "Bounded":
        return Bounded(self.bad, self.token_ids)


@pytest.mark.parametrize("is_early", [False, True])
def test_a_mask_that_failed_behind_a_rejected_draft_ends_no_sequence(is_early: bool) -> None:
    constraint = GrammarConstraint(Bounded((1,)), DecodingParams(9), (0,))
    constraint.masks((1, 5))
    assert not constraint.accept_token(2)
    found = constraint.mask() if is_early else constraint.masks(())
    assert found is not None
    assert not constraint.accept_token(3) and constraint.error is None


def test_a_mask_that_can_not_be_made_behind_drafts_ends_the_sequence_only_there() -> None:
    """Its masks fail from the fourth token on."""
    for drafts, ends in (((7, 14, 21, 28, 35), 4), ((7, 14), None)):
        constraint = followed("7 9 20", FailingGrammars(VOCABULARY))
        masks = constraint.masks(drafts)
        assert len(masks) == 1 + len(drafts)
        taken = [constraint.accept_token(token_id) for token_id in (*drafts, 42)]
        assert (taken.index(True) if True in taken else None) == ends
        assert (constraint.error is None) is (ends is None)
    rejected = followed("7 9 20", FailingGrammars(VOCABULARY))
    rejected.masks((7, 14, 21, 28))
    assert not rejected.accept_token(14)
    assert rejected.masks(()) is not None and rejected.error is None


def test_others_go_on_while_a_grammar_is_compiled() -> None:
    gate = Gate()
    engine = engine_with(gate)
    engine.add(request("slow"))
    engine.add(request("quick", None))
    found = []
    while not any(output.finish_reason for output in found):
        found += engine.step()
    assert {output.request_id for output in found} == {"quick"}
    assert engine.has_work()
    assert engine.step() == []  # waits a little, not for the grammar
    gate.is_open.set()
    assert tuple(tokens(run(engine)["slow", 0])) == expected(request("slow")).token_ids


def test_an_abort_while_its_grammar_is_compiled() -> None:
    gate = Gate()
    engine = engine_with(gate)
    engine.add(request("a", n=2))
    engine.add(request("b"))
    engine.abort("a", 0)
    engine.abort("b")
    gate.is_open.set()
    found = run(engine)
    assert set(found) == {("a", 1)}
    with pytest.raises(InvalidRequestError, match="can't be forked"):
        engine.fork("a", 1)
    assert tuple(tokens(found["a", 1])) == expected(request("a"), 1).token_ids


def test_grammars_of_aborted_requests_are_not_compiled() -> None:
    """One thread compiles; behind it a request with two branches waits, and is aborted."""
    gate = Gate()
    with ThreadPoolExecutor(1) as threads:
        engine = engine_with(gate, threads=threads)
        engine.add(request("first", "3 5 12"))
        engine.add(request("aborted", "3 6 12", n=2))
        engine.add(request("last", "3 7 12"))
        engine.abort("aborted", 0)
        engine.abort("aborted", 1)
        gate.is_open.set()
        found = run(engine)
    assert {name for name, _ in found} == {"first", "last"}
    assert gate.compiled == ["3 5 12", "3 7 12"]


def test_a_grammar_is_compiled_in_the_cache_domain_of_its_request() -> None:
    gate = Gate()
    gate.is_open.set()
    engine = engine_with(gate)
    engine.add(replace(request("a"), cache_domain="5:alice"))
    run(engine)
    engine.add(replace(request("b"), cache_domain="3:bob"))
    run(engine)
    assert gate.domains == ["5:alice", "3:bob"]


def test_a_grammar_that_does_not_compile_ends_its_request_alone() -> None:
    engine = engine_with()
    engine.add(request("bad", "nonsense", n=2))
    engine.add(request("good"))
    found = run(engine)
    for branch in range(2):
        (output,) = found["bad", branch]
        assert output.finish_reason is FinishReason.ERROR
        assert "'nonsense' is not three numbers" in str(output.error)
    assert found["good", 0][-1].finish_reason is FinishReason.STOP


def test_an_engine_without_a_tokenizer_refuses_grammars_by_name() -> None:
    with pytest.raises(InvalidRequestError, match="need a tokenizer") as raised:
        make_engine().add(request("a"))
    assert raised.value.param == "structured_outputs"


def test_a_beam_search_with_a_grammar_is_refused() -> None:
    with pytest.raises(InvalidRequestError, match="beam search obeys no grammar"):
        engine_with().add(request("a", beam_width=2))


def test_a_resumed_branch_goes_on_where_its_tokens_have_led() -> None:
    whole = expected(request("a")).token_ids
    engine = engine_with()
    wanted = request("a")
    resumed = (ResumedBranch(0, whole[:4]),)
    engine.add(Request("a", wanted.prompt_token_ids, wanted.params, 1, resumed=resumed))
    assert tuple(tokens(run(engine)["a", 0])) == whole[4:]


def test_tokens_that_do_not_obey_the_grammar_are_not_resumed() -> None:
    engine = engine_with()
    wanted = request("a")
    resumed = (ResumedBranch(0, (1,)),)
    engine.add(Request("a", wanted.prompt_token_ids, wanted.params, 1, resumed=resumed))
    (output,) = run(engine)["a", 0]
    assert "does not obey the grammar" in str(output.error)


def test_a_fork_has_a_constraint_of_its_own() -> None:
    engine = engine_with()
    engine.add(request("a", "3 2 20", seed=1))
    had: list[int] = []
    while len(had) < 3:
        had += tokens(engine.step())
    branch = engine.fork("a", 0)
    other = engine.fork("a", 0, DecodingParams(30, grammar="1 8 8", seed=1))
    free = engine.fork("a", 0, DecodingParams(len(had) + 3, seed=1))
    found = run(engine)
    assert (branch, other, free) == (1, 2, 3)
    wanted = request("a", "3 2 20", seed=1)
    for index in (1, 2):
        params = wanted.params if index == 1 else DecodingParams(30, grammar="1 8 8", seed=1)
        own = Request("a", wanted.prompt_token_ids, params)
        constraint = constraint_of(own, VOCABULARY, had)
        alone = MODEL.expected_output(
            own, index, LIMITS.max_model_len, forked_token_ids=had, constraint=constraint
        )
        assert tuple(tokens(found["a", index])) == alone.token_ids
    assert len(tokens(found["a", 3])) == 3
    with pytest.raises(InvalidRequestError):
        engine.fork("a", 0)


class Failing(FakeGrammar):
    """Can't be followed behind its fourth token."""

    def start(self):
        return FailingState(super().start(), 0)


class FailingState:
    def __init__(self, inner, count: int) -> None:
        self._inner, self._count = inner, count
        self.is_finished = False

    def consume(self, token_ids: Sequence[int]) -> None:
        self._count += len(token_ids)
        self._inner.consume(token_ids)

    def mask(self) -> bytes:
        if self._count >= 4:
            raise ValueError("the grammar became too complex to follow")
        return self._inner.mask()

    def copy(self):
        return FailingState(self._inner.copy(), self._count)


class FailingGrammars(FakeGrammars):
    def compile(self, grammar: str, domain: str = "") -> FakeGrammar:
        found = super().compile(grammar)
        if found.modulus != 7:
            return found
        return Failing(found.modulus, found.fewest, found.most, VOCABULARY)


def test_a_mask_that_can_not_be_made_ends_its_request_alone() -> None:
    engine = engine_with(FailingGrammars(VOCABULARY))
    engine.add(request("bad", "7 9 20"))
    engine.add(request("good"))
    found = run(engine)
    assert len(tokens(found["bad", 0])) == 4
    assert found["bad", 0][-1].finish_reason is FinishReason.ERROR
    assert found["bad", 0][-1].error == "the grammar became too complex to follow"
    assert tuple(tokens(found["good", 0])) == expected(request("good")).token_ids


def test_a_row_whose_mask_takes_long_waits_alone() -> None:
    """Once its masks are known to take long, it is planned when its mask is there."""
    engine = engine_with(threads=ThreadPoolExecutor(2))
    engine.add(request("slow", "3 40 60", max_tokens=40))
    engine.add(request("quick", None, max_tokens=30))
    while not engine.sequences("slow")[0].num_output_tokens:
        engine.step()
    (slow,) = engine.sequences("slow")
    hold = threading.Event()
    constraint = slow.constraint
    mask = constraint._state.mask

    def held() -> bytes:
        assert hold.wait(10)
        return mask()

    constraint._state.mask = held
    constraint._is_slow = True
    engine.grammars.begin_early(engine.scheduler.running)
    num_before = slow.num_output_tokens
    found = []
    while not any(output.finish_reason for output in found):
        found += engine.step()
    assert {output.request_id for output in found} == {"quick"}
    assert slow.num_output_tokens == num_before
    assert engine.step() == []
    hold.set()
    rest = tokens(run(engine)["slow", 0])
    whole = expected(request("slow", "3 40 60", max_tokens=40)).token_ids
    assert tuple(rest) == whole[num_before:]
