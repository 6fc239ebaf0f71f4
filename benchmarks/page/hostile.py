"""Texts that a model could write to attack the page that shows them.

Markdown, HTML and links that have broken other renderers, and random mixtures of their parts. The
same seed gives the same texts. Used by `browser.py`.
"""

import random

CODE = "window.hacked = 1"
PARTS = (
    f"<script>{CODE}</script>",
    f"<img src=x onerror='{CODE}'>",
    f'<svg onload="{CODE}"><animate onbegin="{CODE}" attributeName=x dur=1s>',
    f"<iframe srcdoc='<script>parent.{CODE}</script>'></iframe>",
    f"[a](javascript:{CODE})",
    f"[a]( javascript:{CODE} )",
    f"[a](JaVaScRiPt:{CODE})",
    f"[a](java\nscript:{CODE})",
    f"[a](data:text/html,<script>{CODE}</script>)",
    f"[a](vbscript:{CODE})",
    '[a](https://evil.example/"onmouseover="window.hacked=1)',
    "[a](https://evil.example/'><script>window.hacked=1</script>)",
    "![a](https://evil.example/pixel.png)",
    "![a](javascript:window.hacked=1)",
    f'![`x`](x" onerror="{CODE})',
    "<https://evil.example/>",
    "[a]: javascript:window.hacked=1\n[a]",
    "https://evil.example/<script>window.hacked=1</script>",
    "`<b>` ``<i>`` ```<script>window.hacked=1</script>```",
    "```html\n<script>window.hacked=1</script>\n```",
    '```"><script>window.hacked=1</script>\n```',
    "~~~\n<img src=x onerror=window.hacked=1>\n",
    "| a | <b onclick=window.hacked=1> |\n|---|---|\n| [x](javascript:window.hacked=1) | y |",
    "> <style>body{display:none}</style>",
    "- <link rel=stylesheet href=//evil.example/x.css>",
    "1. <meta http-equiv=refresh content='0;url=//evil.example'>",
    "# <base href=//evil.example/>",
    "<form action=//evil.example><button>go</button></form>",
    "<object data='javascript:window.hacked=1'></object><embed src='javascript:window.hacked=1'>",
    "<a href='javascript:window.hacked=1' id=prompt name=body>x</a>",
    "&lt;script&gt;window.hacked=1&lt;/script&gt; &#x6A;avascript:window.hacked=1",
    "\u202e<tpircs>\u0000\ufeff\u2028\u2029",
    "*" * 300 + "_" * 300 + "[" * 300 + "`" * 301,
    "**a" * 200,
    ">" * 400 + " x",
    "- " * 200 + "x",
    "[a](" * 200 + ")",
    "__proto__ constructor [x](https://evil.example/__proto__)",
)
"""Single attacks."""

NUM_RANDOM_CHARACTERS = 40
ALPHABET = "<>&\"'`*_~[]()!#|-+\\/:;=\n\t \u0000\u202ea1"


def texts(count: int, seed: int) -> list[str]:
    """The single attacks, then mixtures of them with random characters, `count` in all."""
    generator = random.Random(seed)
    found = list(PARTS[:count])
    while len(found) < count:
        pieces: list[str] = []
        for _ in range(generator.randint(1, 6)):
            part = generator.choice(PARTS)
            start = generator.randrange(len(part))
            pieces.append(part[start:] if generator.random() < 0.5 else part[:start])
            length = generator.randrange(NUM_RANDOM_CHARACTERS)
            pieces.append("".join(generator.choices(ALPHABET, k=length)))
        found.append("".join(pieces))
    return found
