# ruff: noqa: RUF001  (regexes name letters that look like others)
"""Pre-tokenizers by their names in GGUF files: rules that split a text before BPE merges.

`tokenizer.ggml.pre` is llama.cpp's name for the rules of one or more tokenizer.json files. The
rules here are those of the original tokenizers, so that a converted model gets the tokens that it
was trained with. llama.cpp's own regexes are for a different regex engine and omit Unicode
normalization. Called by `text.gguf.backend`.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from tokenizers import Regex, normalizers, pre_tokenizers

from quire.errors import UnsupportedModelError, shown

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_WORDS = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_MARKED_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{L}\p{M}]+"
_SIGNS = r" ?[^\s\p{L}\p{N}]+[\r\n]*"
_SPACES = r"\s*[\r\n]+|\s+(?!\S)|\s+"
_LOWER_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
_UPPER_WORDS = r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
_SIGNS_AND_SLASHES = r" ?[^\s\p{L}\p{N}]+[\r\n/]*"

_LLAMA3 = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1,3}}|{_SIGNS}|{_SPACES}"
_QWEN2 = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}|{_SIGNS}|{_SPACES}"
_QWEN35 = (
    f"{_CONTRACTIONS}|{_MARKED_WORDS}|\\p{{N}}"
    rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|{_SPACES}"
)
_TEKKEN = f"{_LOWER_WORDS}|{_UPPER_WORDS}|\\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
_GPT4O = (
    f"{_LOWER_WORDS}{_CONTRACTIONS}?|{_UPPER_WORDS}{_CONTRACTIONS}?"
    f"|\\p{{N}}{{1,3}}|{_SIGNS_AND_SLASHES}|{_SPACES}"
)
_SEED_CODER = f"{_CONTRACTIONS}|{_WORDS}|\\p{{N}}{{1}}| ?[^\\s\\p{{L}}\\p{{N}}\\r\\n]+|{_SPACES}"
_BAILING = (
    r"'(?i:[sdmt]|ll|ve|re)|[^\r\n\p{L}\p{N}]?+\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]++[\r\n]*"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_EXAONE_MOE = (
    f"{_CONTRACTIONS}"
    r"|[^\r\n\p{L}\p{N}]?(?:\p{L}\p{M}*(?: \p{L}\p{M}*)*)+|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]?"
    r"|\s*[\r\n]|\s+(?!\S)|\s+"
)
_NO_PUNCTUATION = r" ?[^(\s|.,!?…。，、।۔،)]+"
_CJK = "[一-龥぀-ゟ゠-ヿ]+"
_CJK_AND_HANGUL = "[一-龥ࠀ-一가-퟿]+"
_DEEPSEEK_V3 = (
    r"\p{N}{1,3}",
    _CJK,
    r"""[!"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+"""
    rf"| ?[\p{{P}}\p{{S}}]+[\r\n]*|{_SPACES}",
)
_LATIN_AND_GREEK = (
    "A-Za-zµÀ-ÖØ-öø-ƺƼ-ƿǄ-ʓʕ-ʯͰ-ͳͶͷͻ-ͽͿΆΈ-ΊΌΎ-ΡΣ-ϵϷ-ҁҊ-ԯԱ-ՖႠ-ჅᎠ-Ᏽᏸ-ᏽᲐ-ᲺᲽ-Ჿᴀ-ᴫᵫ-ᵷᵹ-ᶚḀ-ἕἘ-Ἕ"
    "ἠ-ὅὈ-Ὅὐ-ὗὙὛὝὟ-\u1f7dᾀ-ᾴᾶ-ᾼ\u1fbeῂ-ῄῆ-ῌῐ-\u1fd3ῖ-\u1fdbῠ-Ῥῲ-ῴῶ-ῼℂℇℊ-ℓℕℙ-ℝℤ\u2126ℨ"
    "\u212a-ℭℯ-ℴℹℼ-ℿⅅ-ⅉⅎↃↄⰀ-ⱻⱾ-ⳤⳫ-ⳮⳲⳳꙀ-ꙭꚀ-ꚛꜢ-ꝯꝱ-ꞇꞋ-ꞎꭰ-ꮿﬀ-ﬆﬓ-ﬗＡ-Ｚａ-ｚ𐐀-𐑏𐒰-𐓓𐓘-𐓻𐲀-𐲲𐳀-𐳲𑢠-𑣟𞤀-𞥃"
)
_DEEPSEEK_LLM = (
    "[\r\n]",
    rf"\s?[{_LATIN_AND_GREEK}]+",
    "\\s?[!-/:-~！-／：-～‘-‟　-。]+",
    r"\s+$",
    _CJK_AND_HANGUL,
    r"\p{N}",
)
_DEEPSEEK_CODER = ("[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _CJK_AND_HANGUL, r"\p{N}")
_YOUTU = (
    "[가-힣ㄱ-ㆎ]+|[！…“”‘’—：；，、-〿︰-﹏]+|[ㄅ-ㄯ]+|[一-龥぀-ゟ゠-ヿ]+",
    f"{_LOWER_WORDS}{_CONTRACTIONS}?|{_UPPER_WORDS}{_CONTRACTIONS}?"
    f"|\\p{{N}}|{_SIGNS_AND_SLASHES}|{_SPACES}",
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How a byte-level tokenizer normalizes and splits a text before it merges."""

    #: Regexes, applied in order. Each one splits every piece of the text so far into its matches
    #: and the text between them.
    splits: Sequence[str] = ()
    #: True if GPT-2's regex is applied after `splits`.
    gpt2_words: bool = False
    #: True if each digit becomes a separate piece, after `splits` and before GPT-2's regex.
    individual_digits: bool = False
    #: True if texts are first normalized to Unicode NFC.
    normal_form: bool = False
    #: True if a piece that is a token becomes that token without any merges.
    whole_words: bool = False
    #: True if a BOS token is added when the file has no setting for it.
    adds_bos: bool = False

    def normalizer(self) -> normalizers.Normalizer | None:
        return normalizers.NFC() if self.normal_form else None

    def build(self, *, add_prefix_space: bool) -> pre_tokenizers.PreTokenizer:
        steps: list[pre_tokenizers.PreTokenizer] = [
            pre_tokenizers.Split(Regex(each), behavior="isolated") for each in self.splits
        ]
        if self.individual_digits:
            steps.append(pre_tokenizers.Digits(individual_digits=True))
        steps.append(
            pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space, use_regex=self.gpt2_words)
        )
        return pre_tokenizers.Sequence(steps)


_GPT2 = PreTokenizer(gpt2_words=True)
_GPT2_IN_NORMAL_FORM = PreTokenizer(gpt2_words=True, normal_form=True)
_DIGITS = PreTokenizer(gpt2_words=True, individual_digits=True)
_LLAMA3_WHOLE = PreTokenizer((_LLAMA3,), whole_words=True, adds_bos=True)
_QWEN = PreTokenizer((_QWEN2,), normal_form=True)
_GPT4O_RULES = PreTokenizer((_GPT4O,))

_BY_RULES: list[tuple[PreTokenizer, tuple[str, ...]]] = [
    (
        _LLAMA3_WHOLE,
        (
            *("llama-bpe", "llama3", "llama-v3", "falcon3", "falcon-h1", "pixtral", "midm-2.0"),
            *("lfm2", "jina-v5-nano"),
        ),
    ),
    (PreTokenizer((_LLAMA3,)), ("dbrx", "smaug-bpe", "chatglm-bpe")),
    (PreTokenizer((_LLAMA3,), whole_words=True), ("glm4", "glm5")),
    (_QWEN, ("qwen2", "megrez", "kormo", "f2llmv2")),
    (PreTokenizer((_QWEN2,)), ("deepseek-r1-qwen", "stablelm2", "hunyuan", "solar-open", "grok-2")),
    (PreTokenizer((_QWEN35,), normal_form=True), ("qwen35",)),
    (PreTokenizer((_TEKKEN,), whole_words=True, adds_bos=True), ("tekken",)),
    (_GPT4O_RULES, ("gpt-4o", "llama4", "kanana2", "talkie", "minimax-m2")),
    (PreTokenizer(_DEEPSEEK_LLM), ("deepseek-llm",)),
    (PreTokenizer(_DEEPSEEK_CODER), ("deepseek-coder",)),
    (PreTokenizer(_DEEPSEEK_V3), ("deepseek-v3", "hunyuan-dense", "joyai-llm", "hy_v4")),
    (PreTokenizer(_YOUTU, whole_words=True), ("youtu",)),
    (
        _GPT2,
        (
            *("gpt-2", "phi-2", "gigachat", "a.x-4.0", "mellum", "exaone4", "trillion"),
            *("granite-docling", "jina-v2-es", "jina-v2-de", "jina-es", "jina-de", "jais"),
        ),
    ),
    (_GPT2_IN_NORMAL_FORM, ("olmo", "mpt", "modern-bert")),
    (_DIGITS, ("smollm", "starcoder", "refact", "codeshell", "exaone", "minerva-7b", "mellum2")),
    (
        PreTokenizer(gpt2_words=True, individual_digits=True, normal_form=True),
        ("command-r",),
    ),
    (PreTokenizer((_SEED_CODER,)), ("seed-coder",)),
    (PreTokenizer((_BAILING,)), ("bailingmoe", "bailingmoe2", "llada-moe")),
    (PreTokenizer((_EXAONE_MOE,)), ("exaone-moe",)),
    (PreTokenizer((_NO_PUNCTUATION,)), ("poro-chat", "bloom", "gpt3-finnish")),
    (PreTokenizer((_NO_PUNCTUATION,), individual_digits=True), ("viking",)),
]
PRE_TOKENIZERS = {name: rules for rules, names in _BY_RULES for name in names}
"""Value of tokenizer.ggml.pre -> rules."""


def find_pre_tokenizer(name: str) -> PreTokenizer:
    """The rules with this name. Raises UnsupportedModelError if the name is unknown or missing,
    since with wrong rules the model would get different tokens than in training."""
    if name in PRE_TOKENIZERS:
        return PRE_TOKENIZERS[name]
    says = "does not say" if name in ("", "default") else f"says ({shown(name)})"
    raise UnsupportedModelError(
        f"its tokenizer.ggml.pre {says} how texts are split in a way that quire knows; name the"
        " original model's tokenizer by --tokenizer (tokenizer= in Python): its folder or hub id"
    )
