"""Makes the grammars of calls in this process, without compiling them."""

from quire.engine_client.grammar_forms import form_of
from quire.text.parsers.dialect import Dialect
from quire.text.tokenizer import Tokenizer


class InProcessGrammars:
    """Has `make` of `GrammarCompilers`. made: the origins of the forms, in their order."""

    def __init__(self, dialect: Dialect, tokenizer: Tokenizer) -> None:
        self._dialect = dialect
        self._tokenizer = tokenizer
        self.made: list[str] = []

    async def make(self, form: str, origin: str) -> str | None:
        self.made.append(origin)
        return form_of(form).grammar(self._dialect, self._tokenizer)
