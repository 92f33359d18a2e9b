"""The tool-call formats by name: the parser and the grammar of each, and the texts by which its
chat templates are recognised."""

from collections.abc import Callable, Mapping
from functools import partial

from headrace_common.structured.structural_format import Format

from ..harmony import header as harmony
from ..harmony.constraint import harmony_format
from ..harmony.parser import HarmonyParser
from ..parts import PartList
from .arrays import array_body, array_format
from .base import Body, MarkedParser, ToolParser
from .constraint import CallConstraint
from .element_format import element_format
from .element_parser import ElementBody, Kinds
from .elements import (
    DEEPSEEK_V4,
    DEEPSEEK_V32,
    DSML,
    ELEMENTS,
    GLM45,
    GLM47,
    MINIMAX_M2,
    QWEN3_CODER,
    SEED_OSS,
    Elements,
)
from .gemma4 import CLOSE as GEMMA_CLOSE
from .gemma4 import OPEN as GEMMA_OPEN
from .gemma4 import QUOTE, gemma4_body
from .gemma4_format import gemma4_format
from .hermes import CLOSE, OPEN, hermes_body, hermes_format
from .llama3_json import TAG, Llama3JsonParser, llama3_json_format
from .marked_pythonic import BLOCKS, LFM2, OLMO3, BlockBody, marked_pythonic_format
from .mistral import MARKER, MistralBody, mistral_format
from .pythonic import END, START, PythonicParser, pythonic_format
from .sections import (
    ARGUMENTS,
    DEEPSEEK_V3,
    DEEPSEEK_V31,
    KIMI_K2,
    SECTIONS,
    SEPARATOR,
    SectionBody,
    section_format,
)

HERMES, LLAMA3_JSON, MISTRAL, PYTHONIC = "hermes", "llama3_json", "mistral", "pythonic"
LLAMA4_PYTHONIC, GRANITE4, NEMOTRON = "llama4_pythonic", "granite4", "nemotron_json"
GEMMA4 = "gemma4"
GRANITE, PHI4_MINI, JAMBA, HUNYUAN = "granite", "phi4_mini_json", "jamba", "hunyuan_a13b"
_ARRAYS: Mapping[str, tuple[str, str]] = {
    GRANITE: ("<|tool_call|>", ""),
    PHI4_MINI: ("functools", ""),
    JAMBA: ("<tool_calls>", "</tool_calls>"),
    HUNYUAN: ("<tool_calls>", "</tool_calls>"),
    NEMOTRON: ("<TOOLCALL>", "</TOOLCALL>"),
}

ParserFactory = Callable[[PartList, Kinds], ToolParser]


def _marked(marker: str, body: Callable[[PartList], Body]) -> ParserFactory:
    """Returns the factory for a format whose calls begin with the same marker for all tools."""
    return lambda parts, _: MarkedParser(marker, lambda parts, _: body(parts), parts)


def _elements(form: Elements) -> ParserFactory:
    def make(parts: PartList, known: Kinds) -> ToolParser:
        def body(parts: PartList, marker: str) -> Body:
            return ElementBody(parts, form, known, marker)

        return MarkedParser(form.opening, body, parts, (form.bare,) if form.bare else ())

    return make


# Each factory takes the tools' names with the kinds of their arguments.
PARSERS: Mapping[str, ParserFactory] = {
    GEMMA4: _marked(GEMMA_OPEN, gemma4_body),
    HERMES: _marked(OPEN, hermes_body),
    GRANITE4: _marked(OPEN, hermes_body),
    LLAMA3_JSON: Llama3JsonParser,
    MISTRAL: _marked(MARKER, MistralBody),
    PYTHONIC: PythonicParser,
    LLAMA4_PYTHONIC: PythonicParser,
    harmony.OPENAI: HarmonyParser,
    **{
        name: _marked(marker, partial(array_body, closing=closing))
        for name, (marker, closing) in _ARRAYS.items()
    },
    **{
        name: _marked(each.opening, partial(BlockBody, block=each)) for name, each in BLOCKS.items()
    },
    **{
        name: _marked(each.opening, partial(SectionBody, section=each))
        for name, each in SECTIONS.items()
    },
    **{name: _elements(form) for name, form in ELEMENTS.items()},
}

# Each returns the format that a text with calls must match, or raises StructuredOutputError.
FORMATS: Mapping[str, Callable[[CallConstraint], Format]] = {
    GEMMA4: gemma4_format,
    HERMES: hermes_format,
    GRANITE4: hermes_format,
    LLAMA3_JSON: llama3_json_format,
    MISTRAL: mistral_format,
    PYTHONIC: pythonic_format,
    LLAMA4_PYTHONIC: pythonic_format,
    harmony.OPENAI: harmony_format,
    **{
        name: partial(array_format, marker=marker, closing=closing)
        for name, (marker, closing) in _ARRAYS.items()
    },
    **{name: partial(marked_pythonic_format, block=block) for name, block in BLOCKS.items()},
    **{name: partial(section_format, section=section) for name, section in SECTIONS.items()},
    **{name: partial(element_format, form=form) for name, form in ELEMENTS.items()},
}

# Markers that the detokenizer must keep in the text even if they are special tokens.
MARKERS: Mapping[str, tuple[str, ...]] = {
    GEMMA4: (GEMMA_OPEN, GEMMA_CLOSE, QUOTE),
    HERMES: (OPEN, CLOSE),
    GRANITE4: (OPEN, CLOSE),
    LLAMA3_JSON: (TAG,),
    MISTRAL: (MARKER, "[ARGS]", "[CALL_ID]"),
    PYTHONIC: (START, END),
    LLAMA4_PYTHONIC: (START, END),
    harmony.OPENAI: harmony.MARKERS,
    **_ARRAYS,
    **{name: (each.opening, each.closing) for name, each in BLOCKS.items()},
    **{name: (*each.markers, SEPARATOR, ARGUMENTS) for name, each in SECTIONS.items()},
    **{name: each.markers for name, each in ELEMENTS.items()},
}

# The format of a template is the first one all of whose texts the template contains. None is a
# format without a parser; its templates also contain the texts of a later format.
_TEMPLATE_SIGNS: tuple[tuple[str | None, tuple[str, ...]], ...] = (
    (DEEPSEEK_V32, (DSML, "function_calls>")),
    (DEEPSEEK_V4, (DSML, "tool_calls>")),
    (MINIMAX_M2, (ELEMENTS[MINIMAX_M2].opening, "<invoke name=")),
    (SEED_OSS, (ELEMENTS[SEED_OSS].opening, "<parameter=")),
    (QWEN3_CODER, (OPEN, "<function=", "<parameter=")),
    (GLM47, (OPEN, "</arg_key><arg_value>")),
    (GLM45, (OPEN, "<arg_key>")),
    (None, ("<function=",)),
    (None, ("<arg_key>",)),
    (KIMI_K2, (SECTIONS[KIMI_K2].opening,)),
    (DEEPSEEK_V3, (SECTIONS[DEEPSEEK_V3].opening, "```json")),
    (DEEPSEEK_V31, (SECTIONS[DEEPSEEK_V31].opening,)),
    (GEMMA4, (GEMMA_OPEN, QUOTE)),
    (LFM2, (BLOCKS[LFM2].opening,)),
    (OLMO3, (BLOCKS[OLMO3].opening,)),
    (MISTRAL, (MARKER,)),
    (PHI4_MINI, ("functools[",)),
    (GRANITE, (_ARRAYS[GRANITE][0],)),
    (NEMOTRON, (_ARRAYS[NEMOTRON][0],)),
    (HUNYUAN, (_ARRAYS[HUNYUAN][0],)),
    (HERMES, (OPEN,)),
    (PYTHONIC, (START,)),
    (PYTHONIC, ("[func_name1(",)),
    (LLAMA3_JSON, (TAG,)),
    (LLAMA3_JSON, ('"parameters": dictionary',)),
)


def detect_tool_parser(template: str) -> str | None:
    """Returns the name of the parser for the calls that a template writes; None if unknown."""
    if harmony.is_harmony(template):
        return harmony.OPENAI
    for name, signs in _TEMPLATE_SIGNS:
        if all(sign in template for sign in signs):
            return name
    return None
