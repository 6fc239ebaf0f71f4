"""Prompts of a gap: the published orders of tokens, by family."""

import string

import pytest
import tokenizers

from quire.errors import InvalidRequestError
from quire.text.fill_in_middle import FORMATS, FillInMiddle
from quire.text.tokenizer import Tokenizer


def make(*added, bos=None, letters=string.ascii_lowercase):
    """A tokenizer of single letters with these further tokens."""
    vocab = {text: at for at, text in enumerate([*letters, *added, *([bos] if bos else [])])}
    backend = tokenizers.Tokenizer(tokenizers.models.BPE(vocab, []))
    backend.add_special_tokens([*added, *([bos] if bos else [])])
    if bos:
        backend.post_processor = tokenizers.processors.TemplateProcessing(
            single=f"{bos} $A", special_tokens=[(bos, vocab[bos])]
        )
    found = Tokenizer(backend)
    if bos:
        found.bos_token_id = vocab[bos]
    return found


def spelled(tokenizer, token_ids):
    names = {token_id: text for text, token_id in tokenizer.token_ids.items()}
    return " ".join(names[token_id] for token_id in token_ids)


@pytest.mark.parametrize(
    ("family", "expected"),
    [
        ("Qwen2.5-Coder", "<|fim_prefix|> a b <|fim_suffix|> c <|fim_middle|>"),
        ("StarCoder", "<fim_prefix> a b <fim_suffix> c <fim_middle>"),
        ("SantaCoder", "<fim-prefix> a b <fim-suffix> c <fim-middle>"),
        (
            "DeepSeek-Coder",
            "<\uff5cfim▁begin\uff5c> a b <\uff5cfim▁hole\uff5c> c <\uff5cfim▁end\uff5c>",
        ),
        ("Code Llama", "▁<PRE> a b ▁<SUF> c ▁<MID>"),
        ("Codestral", "[SUFFIX] c [PREFIX] a b"),
        ("Seed-Coder", "<[fim-suffix]> c <[fim-prefix]> a b <[fim-middle]>"),
    ],
)
def test_each_family_has_its_order(family, expected):
    (form,) = [form for name, form in FORMATS.items() if name.startswith(family)]
    tokenizer = make(*form.tokens)
    fill = FillInMiddle(tokenizer)
    assert fill.format is form
    assert spelled(tokenizer, fill.encode("ab", "c")) == expected
    assert fill.encode([0, 1], "c") == fill.encode("ab", "c")


def test_every_family_is_tried_and_none_hides_another():
    for form in FORMATS.values():
        assert FillInMiddle(make(*form.tokens)).format is form


def test_the_beginning_of_a_text_is_kept_and_ends_are_known():
    form = FORMATS["Code Llama"]
    tokenizer = make(*form.tokens, "▁<EOT>", bos="<s>")
    fill = FillInMiddle(tokenizer)
    assert spelled(tokenizer, fill.encode("a", "b")) == "<s> ▁<PRE> a ▁<SUF> b ▁<MID>"
    plain = fill.encode("", "b", add_special_tokens=False)
    assert spelled(tokenizer, plain) == "▁<PRE> ▁<SUF> b ▁<MID>"
    assert tokenizer.token_ids["▁<EOT>"] in fill.end_token_ids


def test_special_tokens_in_a_suffix_are_text():
    form = FORMATS["StarCoder, StarCoder2, Stable Code, Granite Code"]
    tokenizer = make(*form.tokens, "<|im_end|>", letters=string.ascii_lowercase + "<>_|")
    fill = FillInMiddle(tokenizer)
    for text in ("<fim_middle>", "<|im_end|>", "<<|im_end|><fim_suffix>"):
        assert not {*tokenizer.encode(f"a{text}z")}.isdisjoint(tokenizer.special_token_ids)
        first, second, *inner, last = spelled(tokenizer, fill.encode("", f"a{text}z")).split()
        assert (first, second, last) == form.tokens
        assert inner == list(f"a{text}z")


def test_a_model_without_such_tokens_is_refused_by_name():
    fill = FillInMiddle(make("<|im_end|>", "<|fim_prefix|>"))
    assert fill.format is None and fill.end_token_ids == ()
    with pytest.raises(InvalidRequestError, match="has no tokens for filling a gap") as caught:
        fill.encode("a", "b")
    assert caught.value.param == "suffix"
