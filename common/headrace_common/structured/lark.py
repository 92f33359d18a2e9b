"""Users' grammars, converted to Lark and checked for costs that grow faster than their length."""

import re

from .structured import StructuredOutputError

# Terminals that refer to terminals, and the conversion of GBNF, cost more than their length.
MAX_TERMINALS = 128
MAX_GBNF_CHARS = 16_384
_TERMINAL = re.compile(r"(?m)^\s*_?[A-Z][A-Z0-9_]*(?:\.-?\d+)?(?:\[[^\]\n]*\])?\s*:")


def lark(source: str) -> str:
    """The grammar in Lark's syntax; GBNF, which begins at `root`, is converted.

    Raises StructuredOutputError.
    """
    from llguidance import gbnf_to_lark

    if "%json" in source:
        # Its schema would bypass the checks that other schemas must pass.
        raise StructuredOutputError("grammar", "%json is not supported: send the schema as json")
    if gbnf_to_lark.is_lark_syntax(source):
        if len(_TERMINAL.findall(source)) > MAX_TERMINALS:
            raise StructuredOutputError(
                "grammar",
                f"there are over {MAX_TERMINALS} terminals (names in capitals): make some of them "
                "rules",
            )
        return source
    if len(source) > MAX_GBNF_CHARS or source.count("::=") > MAX_TERMINALS:
        raise StructuredOutputError(
            "grammar",
            f"GBNF may have at most {MAX_GBNF_CHARS} characters and {MAX_TERMINALS} rules: "
            "write a larger one as Lark",
        )
    try:
        return gbnf_to_lark.gbnf_to_lark(source)
    except Exception as error:  # its parser raises plain errors
        raise StructuredOutputError(
            "grammar", f"is neither Lark (rule start) nor GBNF (rule root): {error!s:.200}"
        ) from error
