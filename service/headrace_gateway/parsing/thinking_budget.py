"""Determines whether an answer begins within reasoning whose tokens are limited."""

from collections.abc import Sequence
from dataclasses import replace

from headrace_common.sampling.params import SamplingParams
from headrace_common.sampling.thinking import ThinkingBegin, ThinkingFormat
from headrace_common.text.tokenizer import Tokenizer

from .harmony import header as harmony
from .output import OutputForm
from .reasoning.catalog import FAMILIES, begin_of
from .reasoning.think import Begin


def limit_thinking(
    sampling: SamplingParams, form: OutputForm, tokenizer: Tokenizer, prompt: Sequence[int]
) -> SamplingParams:
    """Returns the sampling for an answer to this prompt, which may have begun or ended the
    reasoning."""
    if sampling.thinking_token_budget is None or form.reasoning is None:
        return sampling
    if form.reasoning == harmony.OPENAI_GPTOSS:
        return replace(sampling, thinking_format=_harmony(form, tokenizer, prompt))
    family = FAMILIES[form.reasoning]
    begin = begin_of(form.reasoning, tokenizer, prompt)
    if begin is Begin.CLOSED:
        return replace(sampling, thinking_token_budget=None)
    inside = begin is Begin.INSIDE or family.otherwise_inside
    where = ThinkingBegin.INSIDE if inside else ThinkingBegin.OPEN
    written = ThinkingFormat(opening=family.opening, closing=family.closing, begin=where)
    return replace(sampling, thinking_format=written)


def _harmony(form: OutputForm, tokenizer: Tokenizer, prompt: Sequence[int]) -> ThinkingFormat:
    """Returns the format of messages in `analysis`. If there are tools, the model then decides
    whether to call one."""
    begin = harmony.begin_of(tokenizer, prompt)
    reasons = harmony.Header.read(begin.header).purpose(None) is harmony.Purpose.REASONING
    answer = f"{harmony.CHANNEL}final{harmony.MESSAGE}"
    return ThinkingFormat(
        opening=f"{harmony.CHANNEL}analysis{harmony.MESSAGE}",
        closing=harmony.END,
        ending=f"{harmony.END}{harmony.START}assistant{'' if form.calls else answer}",
        begin=ThinkingBegin.INSIDE if begin.inside and reasons else ThinkingBegin.OPEN,
        begun="" if begin.inside else begin.header[-harmony.MAX_HEADER_CHARS :],
        again=True,
        answer=answer,
    )
