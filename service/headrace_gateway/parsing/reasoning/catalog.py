"""The parsers of reasoning by name, which one a template needs, and where a text begins."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache

from headrace_common.text.chat_template import ChatTemplate, ChatTemplateError
from headrace_common.text.tokenizer import Tokenizer

from ..harmony.header import OPENAI_GPTOSS, is_harmony
from .think import Begin, ThinkParser

DEEPSEEK_R1, QWEN3, MISTRAL = "deepseek_r1", "qwen3", "mistral"
DEEPSEEK_V3, GLM45, KIMI_K2 = "deepseek_v3", "glm45", "kimi_k2"
MINIMAX_M2, SEED_OSS, GEMMA4 = "minimax_m2", "seed_oss", "gemma4"
# Characters of the prompt's end that show whether the template has opened or closed the reasoning.
_TAIL_TOKENS = 24
# A question, and variables with which templates that have any of them switch reasoning on.
_QUESTION = ({"role": "user", "content": "Hello!"},)
_SWITCHED_ON: Mapping[str, bool | str] = {
    "enable_thinking": True,
    "thinking": True,
    "reasoning_effort": "high",
}


@dataclass(frozen=True, slots=True)
class Family:
    """A family of models. `otherwise_inside`: they may omit the opening marker. `label`: what
    follows it."""

    opening: str
    closing: str
    otherwise_inside: bool = False
    label: str = ""


_THINK = Family("<think>", "</think>")
_THINK_AT_ONCE = Family("<think>", "</think>", otherwise_inside=True)

FAMILIES: Mapping[str, Family] = {
    DEEPSEEK_R1: _THINK_AT_ONCE,
    DEEPSEEK_V3: _THINK,
    "deepseek_v4": _THINK,
    GEMMA4: Family("<|channel>", "<channel|>", label="thought"),
    GLM45: _THINK,
    "glm47": _THINK,
    KIMI_K2: _THINK,
    "mimo": _THINK,
    MINIMAX_M2: _THINK_AT_ONCE,
    MISTRAL: Family("[THINK]", "[/THINK]"),
    "nemotron_v3": _THINK_AT_ONCE,
    "olmo3": _THINK_AT_ONCE,
    QWEN3: _THINK,
    SEED_OSS: Family("<seed:think>", "</seed:think>"),
    "step3p5": _THINK_AT_ONCE,
}


def detect_reasoning_parser(template: str) -> str | None:
    """Returns the name of the parser for a template with reasoning; else None."""
    if is_harmony(template):
        return OPENAI_GPTOSS
    for name in (QWEN3, MISTRAL, SEED_OSS, GEMMA4):
        if FAMILIES[name].closing in template:
            return name
    return None


@lru_cache(maxsize=64)
def opens_reasoning(name: str, template: ChatTemplate) -> bool:
    """Returns whether the template itself writes the opening marker when reasoning is on.

    A prompt of such a template that does not end with the marker asks for no reasoning.
    """
    family = FAMILIES.get(name)
    if family is None or family.otherwise_inside or not template.bounded:
        return False
    try:
        text = template.render(_QUESTION, variables=_SWITCHED_ON)
    except ChatTemplateError:
        return False
    return _is_open(family, text)


def think_parser(name: str, tokenizer: Tokenizer, prompt: Sequence[int]) -> ThinkParser:
    """Returns a parser for one answer to this prompt."""
    family = FAMILIES[name]
    return ThinkParser(
        family.opening,
        family.closing,
        begin_of(name, tokenizer, prompt),
        otherwise_inside=family.otherwise_inside,
        label=family.label,
    )


def begin_of(name: str, tokenizer: Tokenizer, prompt: Sequence[int]) -> Begin:
    """Returns where the answer to a prompt begins, as far as the prompt shows."""
    family = FAMILIES[name]
    tail = tokenizer.decode(prompt[-_TAIL_TOKENS:], skip_special_tokens=False).rstrip()
    if _is_open(family, tail):
        return Begin.INSIDE
    return Begin.CLOSED if tail.endswith(family.closing) else Begin.OPEN


def _is_open(family: Family, prompt: str) -> bool:
    return prompt.rstrip().endswith((family.opening, family.opening + family.label))
