"""How much a model is to reason and to say, as its chat template understands it."""

from collections.abc import Mapping, Set
from typing import Any

from headrace_common.sampling import SamplingParams

from .errors import invalid
from .models import ServedModel
from .reasoning.catalog import detect_reasoning_parser
from .strict_calls import may_reason

# The switch of Qwen3's template and those after it; DeepSeek's calls it `thinking`.
SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
VERBOSITY = "verbosity"


def with_effort(
    model: ServedModel,
    variables: Mapping[str, Any] | None,
    effort: str | None,
    param: str = EFFORT,
) -> Mapping[str, Any] | None:
    """The template's variables with OpenAI's effort. Raises ApiError where it has no such thing.

    A template with a mere switch is switched off by `none`, and on by everything else; one without
    reasoning has `none` anyway.
    """
    if effort is None:
        return variables
    given = variables or {}
    if EFFORT in _variables(model):
        return {EFFORT: effort, **given}
    switched = thinking_variables(model, thinking=effort != "none")
    if not switched and effort == "none" and not _reasons(model):
        return variables
    if not switched:
        raise invalid(
            f"{param}: the chat template of {model.name} has no such setting; leave it out.",
            param=param,
            code="unsupported_parameter",
        )
    return {**switched, **given}


def with_verbosity(
    model: ServedModel, variables: Mapping[str, Any] | None, verbosity: str | None
) -> Mapping[str, Any] | None:
    """The template's variables with OpenAI's verbosity, a hint that few templates know."""
    if verbosity is None or VERBOSITY not in _variables(model):
        return variables
    return {VERBOSITY: verbosity, **(variables or {})}


def without_thinking(
    model: ServedModel, variables: Mapping[str, Any] | None, sampling: SamplingParams
) -> Mapping[str, Any] | None:
    """The variables for this sampling: an output that is held to a form has no room to reason.

    What the request says itself stays.
    """
    held = sampling.structured_outputs
    if held is None or may_reason(held):
        return variables
    return {**thinking_variables(model, thinking=False), **(variables or {})}


def thinking_variables(model: ServedModel, *, thinking: bool) -> Mapping[str, Any]:
    """The variables that switch reasoning on or off, as far as the template has a switch."""
    known = _variables(model)
    return {name: thinking for name in SWITCHES if name in known}


def _reasons(model: ServedModel) -> bool:
    template = model.chat_template
    return template is not None and detect_reasoning_parser(template.source) is not None


def _variables(model: ServedModel) -> Set[str]:
    return frozenset() if model.chat_template is None else model.chat_template.variables
