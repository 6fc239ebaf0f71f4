"""Decodes the text in a custom tool's JSON arguments {"input": "..."} piece by piece."""

import json
import re

_OPENING = re.compile(r'[^"]*"[^"]*"[^"]*"')
"""The JSON before the text; the first two quotation marks enclose the argument's name."""

_WHOLE = re.compile(
    r"""(?: [^"\\]
          | \\ [^u]
          | \\u (?! [dD][89abAB]) [0-9a-fA-F]{4}
          | \\u [dD][89abAB][0-9a-fA-F]{2} \\u [dD][c-fC-F][0-9a-fA-F]{2}
          | \\u [dD][89abAB][0-9a-fA-F]{2} (?= [^\\] | \\[^u] | \\u[^dD] | \\u[dD][^c-fC-F] )
        )*""",
    re.VERBOSE,
)
"""Complete characters and escapes. The escape of a surrogate pair's first half is incomplete until
the next characters show whether the second half follows."""

_HALF_OF_A_PAIR = re.compile("[\ud800-\udfff]")


class TextArgument:
    r"""Decodes the text in {"input": "..."}, piece by piece.

    Invariant: `_rest` is the input that is not decoded yet: before the text begins, the whole
    input; afterwards, at most an incomplete character.
    """

    def __init__(self) -> None:
        self._rest = ""
        self._has_begun = self._has_ended = False

    def push(self, piece: str) -> str:
        """Add a piece of the JSON; returns the text that it completes."""
        if self._has_ended:
            return ""
        self._rest += piece
        if not self._has_begun:
            opening = _OPENING.match(self._rest)
            if opening is None:
                return ""
            self._has_begun, self._rest = True, self._rest[opening.end() :]
        whole = _WHOLE.match(self._rest)
        assert whole is not None, "it matches the empty text, too"
        self._rest = self._rest[whole.end() :]
        self._has_ended = self._rest.startswith('"')
        text: str = json.loads(f'"{whole[0]}"', strict=False)
        return _HALF_OF_A_PAIR.sub("\ufffd", text)
