"""Measures combinations of models and number formats, one after the other, on windows of texts.

The first combination is the reference: the first model in its own number formats. Memory holds one
model at a time, in addition to the reference's head.
"""

import gc
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from quire.assembly.model_kind import choose_kind, tokenizer_folder
from quire.attention.kv_registry import AUTO
from quire.bench.quality.comparison import Quality, Reference, compare
from quire.bench.quality.readers import EngineReader, Reader, open_reader
from quire.bench.quality.windows import DEFAULT_WINDOW_TOKENS, Window, cut
from quire.errors import ConfigurationError
from quire.options.engine_options import EngineOptions
from quire.text.tokenizer import Tokenizer


@dataclass(frozen=True, slots=True)
class Combination:
    """A model, and the formats in which it is measured."""

    #: Path or hub id; None means the embedded model.
    model: str | None = None

    #: The dtype of the computation; None leaves the choice to the engine.
    dtype: str | None = None

    #: The weight format; None means the format of the model's files.
    quantization: str | None = None
    kv_cache_dtype: str = AUTO


@dataclass(frozen=True, slots=True)
class Measured:
    """The quality and the sizes of a combination. `readers.Reader` explains the sizes."""

    quality: Quality

    #: The dtype of the computation.
    dtype: str
    weight_bytes: int
    linear_bits: float
    token_bytes: int
    is_simulated: bool


@dataclass(frozen=True, slots=True)
class TextCut:
    """The options for cutting texts into windows."""

    #: Tokens of a window; None means DEFAULT_WINDOW_TOKENS, or the model's context if that is
    #: shorter.
    window_tokens: int | None = None

    #: Maximum number of tokens that are used of each text; None means no limit.
    max_tokens: int | None = None


@dataclass(slots=True)
class Measuring:
    """Runs the reference on the texts, then compares any combination with the reference."""

    #: The contents of each file.
    texts: Sequence[str]

    #: The engine's options that all combinations share.
    options: Mapping[str, Any]

    cut: TextCut
    windows: list[Window] = field(init=False)
    window_tokens: int = field(init=False)
    kernels: str = field(init=False)
    _reference: Reference = field(init=False)
    _token_ids: list[list[int]] = field(init=False)
    _decoded: list[str] = field(init=False)
    _vocab_size: int = field(init=False)
    _checked: set[str | None] = field(init=False)

    def read_reference(self, combination: Combination) -> Measured:
        """Measure the reference. This must be called first.

        Raises ConfigurationError if the model can't be loaded or there is nothing to predict.
        """
        reader = EngineReader(self._options(combination))
        self._token_ids = self._encode(reader)
        self._decoded = self._decode(reader.tokenizer)
        self._vocab_size, self.kernels = reader.vocab_size, reader.kernels
        self._checked = {combination.model}
        self._cut(reader)
        hidden = [reader.hidden(window) for window in self.windows]
        sizes = _sizes(reader)
        logits = reader.take_head()
        del reader
        gc.collect()
        self._reference = Reference(hidden, logits)
        return Measured(compare(self.windows, hidden, logits, self._reference), **sizes)

    def measure(self, combination: Combination) -> Measured:
        """Measure a combination against the reference.

        Raises ConfigurationError if the combination is not available or has another vocabulary.
        """
        gc.collect()  # frees the previous engine, which has reference cycles
        options = self._options(combination)
        if combination.model not in self._checked:
            self._check_same_tokens(combination.model, options)
        reader = open_reader(options, combination.kv_cache_dtype)
        hidden = (reader.hidden(window) for window in self.windows)
        found = compare(self.windows, hidden, reader.logits, self._reference)
        return Measured(found, **_sizes(reader))

    def _options(self, combination: Combination) -> dict[str, Any]:
        given = {"model": combination.model, "dtype": combination.dtype}
        return {
            **self.options,
            **{name: value for name, value in given.items() if value is not None},
            "quantization": combination.quantization,
        }

    def _encode(self, reader: EngineReader) -> list[list[int]]:
        """The texts' tokens, without special tokens that the tokenizer adds."""
        encoded = (reader.tokenizer.encode(text, add_special_tokens=False) for text in self.texts)
        return [token_ids[: self.cut.max_tokens] for token_ids in encoded]

    def _cut(self, reader: EngineReader) -> None:
        most, wanted = reader.max_window, self.cut.window_tokens
        if wanted is not None and wanted > most:
            raise ConfigurationError(
                f"window_tokens is {wanted}, but the model's context takes {most} at most"
            )
        self.window_tokens = wanted or min(DEFAULT_WINDOW_TOKENS, most)
        tokenizer = reader.tokenizer
        prefix = [each for each in tokenizer.encode("") if each == tokenizer.bos_token_id]
        if self.window_tokens <= len(prefix):
            raise ConfigurationError(
                f"window_tokens is {self.window_tokens}, which leaves no room after the tokens"
                " that the tokenizer puts first; raise it"
            )
        self.windows = [
            window
            for token_ids in self._token_ids
            for window in cut(token_ids, self.window_tokens, prefix)
        ]
        if not self.windows:
            raise ConfigurationError(
                "the text has fewer than two tokens: there is nothing to predict"
            )

    def _decode(self, tokenizer: Tokenizer) -> list[str]:
        return [tokenizer.decode(ids, skip_special_tokens=False) for ids in self._token_ids]

    def _check_same_tokens(self, model: str | None, options: Mapping[str, Any]) -> None:
        """Raises ConfigurationError if the model's tokenizer decodes the reference's tokens
        differently.

        All models read the reference's tokens, so their tokenizers may split texts differently.
        """
        kind = choose_kind(EngineOptions.from_mapping(options))
        tokenizer = Tokenizer.from_folder(tokenizer_folder(kind.options))
        if kind.config.vocab_size != self._vocab_size or self._decode(tokenizer) != self._decoded:
            raise ConfigurationError(
                f"model is {model!r}, whose tokens are not the reference's, so their distributions"
                " can't be compared; name models of one tokenizer"
            )
        self._checked.add(model)


def _sizes(reader: Reader) -> dict[str, Any]:
    names = ("dtype", "weight_bytes", "linear_bits", "token_bytes", "is_simulated")
    return {name: getattr(reader, name) for name in names}


def combine(
    models: Sequence[str | None],
    dtypes: Sequence[str | None],
    formats: Mapping[str | None, Sequence[str | None]],
    kv_formats: Sequence[str],
) -> Iterator[Combination]:
    """All distinct combinations. The first is the reference: the first model and dtype, without
    further rounding. `formats` has the weight formats of each model."""
    found = [Combination(models[0], dtypes[0])]
    found += [
        Combination(model, dtype, quantization, kv_format)
        for model in models
        for dtype in dtypes
        for quantization in formats[model]
        for kv_format in kv_formats
    ]
    yield from dict.fromkeys(found)
