"""Measures grammars on JSON Schema's test suite: what is accepted, wrongly accepted, and how fast.

    python benchmarks/grammars/json_schema_suite.py SUITE [--model FOLDER]

SUITE: the folder `tests` of the suite (draft4 ... draft2020-12), which the source archive of the
package jsonschema has as `json/tests`. --model: a folder whose tokenizer is used; without one, a
synthetic vocabulary of 150,000 tokens. Masks are made for every token of every valid instance.
"""

import argparse
import json
import random
import time
from collections import Counter
from collections.abc import Iterator
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


def synthetic_tokenizer(num_tokens: int) -> Tokenizer:
    """Byte-level: all bytes, then words of 2 to 12 letters with and without a space, digits."""
    draw = random.Random(7)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    vocab = {character: index for index, character in enumerate(sorted(alphabet))}
    for text in ('{"', '":', '",', '"}', '":"', '","', "},", "],", "[]", "{}", "Ġ{", 'Ġ"', "ĊĠĠ"):
        vocab.setdefault(text, len(vocab))
    while len(vocab) < num_tokens:
        letters = "".join(
            draw.choices("etaoinshrdlucmfwypvbgkqjxz_-0123456789", k=draw.randint(2, 12))
        )
        vocab.setdefault(draw.choice(("", "Ġ", '"', "ĉ")) + letters, len(vocab))
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


class Tally:
    """What came of all schemas and instances, with times in seconds."""

    def __init__(self, compiler: GrammarCompiler) -> None:
        self._compiler = compiler
        self._tokens = GreedyTokens(compiler.tokenizer)
        self.counts: Counter[str] = Counter()
        self.refusals: Counter[str] = Counter()
        self.wrong: list[str] = []
        self.compile_s: list[float] = []
        self.mask_s: list[float] = []

    def add(self, where: str, case: dict[str, Any]) -> None:
        self.counts["schemas"] += 1
        began = time.perf_counter()
        try:
            params = StructuredOutputsParams(json=json.dumps(case["schema"]))
            compiled = self._compiler.compile(grammar_of(params))
        except InvalidRequestError as error:
            reason = str(error).removeprefix("structured_outputs.json: ").partition(": ")[2]
            self.refusals[" ".join(reason.split()[:2])] += 1
            return
        self.compile_s.append(time.perf_counter() - began)
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
                    began = time.perf_counter()
                    state.mask()
                    self.mask_s.append(time.perf_counter() - began)
                state.consume([token_id])
            is_accepted = state.can_end
        except ValueError:
            is_accepted = False
        kind = "valid" if test["valid"] else "invalid"
        self.counts[f"{kind} instances"] += 1
        self.counts[f"{kind} instances accepted"] += is_accepted
        if is_accepted and not test["valid"]:
            self.wrong.append(f"{where}: {test['description']}")


def percentile(values: list[float], share: float) -> float:
    return sorted(values)[int(share * (len(values) - 1))]


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
    began = time.perf_counter()
    _ = compiler.vocabulary.tokenizer
    print(f"vocabulary of {tokenizer.vocab_size}: built in {time.perf_counter() - began:.2f} s")
    tally = Tally(compiler)
    for where, case in cases(args.suite):
        tally.add(where, case)
    for name, count in sorted(tally.counts.items()):
        print(f"{count:6} {name}")
    print("refused:", ", ".join(f"{name} {n}" for name, n in tally.refusals.most_common(40)))
    for name, values, unit in (
        ("compile", tally.compile_s, 1e3),
        ("mask", tally.mask_s, 1e6),
    ):
        print(
            f"{name}: average {unit * sum(values) / len(values):.2f}, p50 "
            f"{unit * percentile(values, 0.5):.2f}, p99 {unit * percentile(values, 0.99):.2f}, "
            f"max {unit * max(values):.2f} {'ms' if unit == 1e3 else 'us'} ({len(values)} of them)"
        )
    for line in tally.wrong:
        print("WRONGLY ACCEPTED", line)


if __name__ == "__main__":
    main()
