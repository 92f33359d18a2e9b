"""Attacks that still do harm, by the first words of their names: they are not tried in CI.

An entry goes when its repair comes; nothing else may be added than what a repair is on its way for.
"""

UNREPAIRED: tuple[str, ...] = ()
