"""The parsers of tool calls by name, and which one a model's chat template calls for."""

from collections.abc import Callable, Collection, Mapping

from ..parts import PartList
from .base import ToolParser
from .hermes import OPEN, HermesParser
from .llama3_json import TAG, Llama3JsonParser
from .mistral import MARKER, MistralParser
from .pythonic import START, PythonicParser

HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC = "hermes", "llama3_json", "mistral", "pythonic"

PARSERS: Mapping[str, Callable[[PartList, Collection[str]], ToolParser]] = {
    HERMES: lambda parts, _: HermesParser(parts),
    LLAMA3_JSON: Llama3JsonParser,
    MISTRAL: lambda parts, _: MistralParser(parts),
    PYTHONIC: PythonicParser,
}

# What a parser must see in the text, though it may be a special token.
MARKERS: Mapping[str, tuple[str, ...]] = {
    HERMES: (OPEN,),
    LLAMA3_JSON: (TAG,),
    MISTRAL: (MARKER, "[ARGS]", "[CALL_ID]"),
    PYTHONIC: (START,),
}

# In this order: texts of which one in a template tells its form.
_SIGNS: tuple[tuple[str, tuple[str, ...]], ...] = (
    (MISTRAL, (MARKER,)),
    (HERMES, (OPEN,)),
    (PYTHONIC, (START, "[func_name1(")),
    (LLAMA3_JSON, (TAG, '"parameters": dictionary')),
)
# Forms that have a sign of another one in them but are not read here.
_OTHERS = ("<function=", "<arg_key>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>")


def detect_tool_parser(template: str) -> str | None:
    """The name of the parser for the calls that a template writes; None where it is not known."""
    if any(sign in template for sign in _OTHERS):
        return None
    for name, signs in _SIGNS:
        if any(sign in template for sign in signs):
            return name
    return None
