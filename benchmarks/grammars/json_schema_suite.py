"""Measures grammars on JSON Schema's test suite: what is accepted, wrongly accepted, and how fast.

    python benchmarks/grammars/json_schema_suite.py SUITE [--model FOLDER]

SUITE: the folder `tests` of the suite (draft4 ... draft2020-12), which the source archive of the
package jsonschema has as `json/tests`. --model: a folder whose tokenizer is used; without one, a
synthetic vocabulary of 150,000 tokens.

A mask is made wherever a model would need one: for every token of every valid instance, which is
split into the longest tokens, and for the end token. Every instance starts from the compiled schema
as a request does, and every mask counts once. `compile` is all from the schema's text to the state
before the first token, the first mask included. Times are of the processor, of all threads
together, so that what else runs on the machine does not count; those on the clock are beside them.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from quire.core.structured_outputs import StructuredOutputsParams
from quire.errors import InvalidRequestError
from quire.text.grammars import CompiledGrammar, GrammarCompiler, grammar_of
from quire.text.tokenizer import Tokenizer

URIS = {
    "draft4": "http://json-schema.org/draft-04/schema#",
    "draft6": "http://json-schema.org/draft-06/schema#",
    "draft7": "http://json-schema.org/draft-07/schema#",
    "draft2019-09": "https://json-schema.org/draft/2019-09/schema",
    "draft2020-12": "https://json-schema.org/draft/2020-12/schema",
}


SHARES = {"Ġ": 0.45, "ĉ": 0.01, "Ċ": 0.003, '"': 0.003, "": 0.534}
"""How the words of the synthetic vocabulary begin: near the shares in Llama 3's, of whose 128,256
tokens 45% begin with a space and 0.3% with a quotation mark, after which a string continues."""

ENDINGS = ('"', ".", ",", ")", "(", ":", ";", "=", "/", ">", "]", "}", "'", "*")
"""For one word in ten; 0.7% of Llama 3's tokens have a quotation mark after their first byte."""

LETTERS = "etaoinshrdlucmfwypvbgkqjxz_-0123456789"
CYRILLIC = [first + chr(second) for first in "ÐÑ" for second in range(0xAE, 0xC0)]
"""As a byte-level vocabulary writes them: two bytes each. A quarter of the words are of these."""


def synthetic_tokenizer(num_tokens: int) -> Tokenizer:
    """Byte-level: all bytes, what JSON is made of, blanks, then words.

    As in a vocabulary that BPE has made, a word goes on from another one by a few letters, so that
    the tokens have about as many different beginnings: 2.4 for each (Llama 3: 2.2).
    """
    draw = random.Random(7)
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {character: index for index, character in enumerate(alphabet)}
    marks = ['{"', '":', '",', '"}', '":"', '","', "},", "],", "[]", "{}", "Ġ{", 'Ġ"']
    blanks = [blank * count for blank in "ĠĊĉ" for count in range(2, 100)]
    lines = ["Ċ" + "Ġ" * count for count in range(1, 33)]
    for text in (*marks, *blanks, *lines):
        vocab.setdefault(text, len(vocab))
    shares, begins = list(SHARES.values()), list(SHARES)
    words = {(begin, is_cyrillic): [begin] for begin in begins for is_cyrillic in (False, True)}
    while len(vocab) < num_tokens:
        (begin,) = draw.choices(begins, shares)
        is_cyrillic = draw.random() < 0.25
        known = words[begin, is_cyrillic]
        shortest = min(draw.choices(known, k=3), key=len)
        letters = draw.choices(CYRILLIC if is_cyrillic else LETTERS, k=draw.randint(1, 3))
        known.append(shortest + "".join(letters))
        end = draw.choice(ENDINGS) if draw.random() < 0.1 else ""
        vocab.setdefault(known[-1] + end, len(vocab))
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=[]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<|end|>"])
    return Tokenizer(backend)


class GreedyTokens:
    """Splits a text into the longest tokens, which is near what a model writes."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self._ids: dict[bytes, int] = {}
        for token_id in range(tokenizer.vocab_size):
            if token_id not in tokenizer.special_token_ids:
                self._ids.setdefault(tokenizer.token_bytes(token_id), token_id)
        self._longest = max(map(len, self._ids))

    def encode(self, text: str) -> list[int]:
        data, position, ids = text.encode(), 0, []
        while position < len(data):
            for length in range(min(self._longest, len(data) - position), 0, -1):
                token_id = self._ids.get(data[position : position + length])
                if token_id is not None:
                    ids.append(token_id)
                    position += length
                    break
            else:
                raise ValueError("the vocabulary has no token for a byte of the text")
        return ids


def cases(suite: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    """Draft with file, and each schema of the suite with its instances."""
    for draft, uri in URIS.items():
        for path in sorted((suite / draft).rglob("*.json")):
            for case in json.loads(path.read_text()):
                schema = case["schema"]
                if isinstance(schema, dict) and "$schema" not in schema:
                    case["schema"] = {"$schema": uri, **schema}
                yield f"{draft}/{path.stem}", case


class Times:
    """The times of one kind of work, in seconds of the processor and of the clock."""

    def __init__(self) -> None:
        self.processor_s: list[float] = []
        self.clock_s: list[float] = []

    @contextmanager
    def measured(self) -> Iterator[None]:
        """Count the time of a `with` that does not raise."""
        clock_s, processor_s = time.perf_counter(), time.process_time()
        yield
        self.processor_s.append(time.process_time() - processor_s)
        self.clock_s.append(time.perf_counter() - clock_s)

    def line(self, scale: float, unit: str) -> str:
        """The line to print. A unit is a second divided by `scale`."""
        parts = []
        for name, values in (("processor", self.processor_s), ("clock", self.clock_s)):
            ordered = sorted(values)
            shown = {
                "average": sum(ordered) / len(ordered),
                **{f"p{share}": percentile(ordered, share) for share in (50, 90, 99, 100)},
            }
            figures = ", ".join(f"{key} {scale * value:.2f}" for key, value in shown.items())
            parts.append(f"{figures} {unit} ({name})")
        return f"{len(self.clock_s)} of them\n    " + "\n    ".join(parts)


class Tally:
    """The results of all schemas and instances, with times in seconds."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._tokens = GreedyTokens(compiler.tokenizer)
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.compile, self.mask, self.consume = Times(), Times(), Times()

    def add(self, where: str, case: dict[str, Any]) -> None:
        self.counts["schemas"] += 1
        try:
            params = StructuredOutputsParams(json=json.dumps(case["schema"]))
            with self.compile.measured():
                compiled = self._compiler.compile(grammar_of(params))
        except InvalidRequestError as error:
            reason = str(error).removeprefix("structured_outputs.json: ").partition(": ")[2]
            self.refusals[" ".join(reason.split()[:2])] += 1
            return
        self.counts["schemas accepted"] += 1
        for test in case["tests"]:
            self._instance(compiled, test, f"{where}: {case['description']}")

    def _instance(self, compiled: CompiledGrammar, test: dict[str, Any], where: str) -> None:
        try:
            ids = self._tokens.encode(json.dumps(test["data"], ensure_ascii=False))
        except UnicodeEncodeError:  # half a surrogate pair: no text of a model
            return
        state = compiled.start()
        is_accepted = True
        try:
            for token_id in ids:
                if test["valid"]:
                    with self.mask.measured():
                        state.mask()
                with self.consume.measured():
                    state.consume([token_id])
            is_accepted = state.can_end
            if test["valid"] and not state.is_finished:  # else the answer ends without a mask
                with self.mask.measured():
                    state.mask()
        except ValueError:
            is_accepted = False
        kind = "valid" if test["valid"] else "invalid"
        self.counts[f"{kind} instances"] += 1
        self.counts[f"{kind} instances accepted"] += is_accepted
        if is_accepted and not test["valid"]:
            self.wrong.append(f"{where}: {test['description']}")


def percentile(ordered: list[float], percent: int) -> float:
    return ordered[percent * (len(ordered) - 1) // 100]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("suite", type=Path)
    parser.add_argument("--model", type=Path)
    parser.add_argument("--synthetic-tokens", type=int, default=150_000)
    args = parser.parse_args()
    if args.model is None:
        tokenizer = synthetic_tokenizer(args.synthetic_tokens)
    else:
        tokenizer = Tokenizer.from_folder(args.model)
    end = max(tokenizer.special_token_ids)
    compiler = GrammarCompiler(tokenizer, tokenizer.vocab_size, [end], max_cached=0)
    vocabulary = Times()
    with vocabulary.measured():
        compiler.vocabulary.make()
    print(f"vocabulary of {tokenizer.vocab_size}, built:", vocabulary.line(1, "s"))
    tally = Tally(compiler)
    for where, case in cases(args.suite):
        tally.add(where, case)
    for name, count in sorted(tally.counts.items()):
        print(f"{count:6} {name}")
    print("refused:", ", ".join(f"{name} {n}" for name, n in tally.refusals.most_common(40)))
    print("compile:", tally.compile.line(1e3, "ms"))
    print("mask:", tally.mask.line(1e6, "us"))
    print("consume:", tally.consume.line(1e6, "us"))
    for line in tally.wrong:
        print("WRONGLY ACCEPTED", line)


if __name__ == "__main__":
    main()
