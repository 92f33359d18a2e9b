"""Attacks that still do harm, by the first words of their names: they are not tried in CI.

An entry goes when its repair comes; nothing else may be added than what a repair is on its way for.
"""

UNREPAIRED: tuple[str, ...] = (
    "64 bodies of 8 MB but for the end",
    "300 idle connections",
    "a template's variable `self`",
    "4 MiB of",
    "1,020 inputs to embed",
    "1/100 ",
    "1/110 ",
    "1/155 ",
    "1/258 ",
    "1/261 ",
)
