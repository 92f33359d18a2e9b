"""The variables that tell a chat template how much to reason, and how verbose to be."""

from collections.abc import Mapping, Set
from typing import Any

from headrace_common.sampling.params import SamplingParams

from ..errors import ApiError, invalid
from ..models.models import ServedModel
from .harmony.header import OPENAI_GPTOSS
from .reasoning.catalog import detect_reasoning_parser
from .strict_calls import may_reason

# The switch of Qwen3's and later templates; in DeepSeek's it is `thinking`.
SWITCHES = ("enable_thinking", "thinking")
EFFORT = "reasoning_effort"
VERBOSITY = "verbosity"
BUDGET = "thinking_budget"
# Efforts that gpt-oss does not know, with the nearest one that it does.
_GPTOSS_EFFORTS = {"minimal": "low", "xhigh": "high", "max": "high"}


def with_effort(
    model: ServedModel,
    variables: Mapping[str, Any] | None,
    effort: str | None,
    param: str = EFFORT,
) -> Mapping[str, Any] | None:
    """Returns the template's variables with OpenAI's effort. Raises ApiError if it has no such
    setting.

    If a template only has a switch, `none` turns it off and any other effort turns it on. A
    template without reasoning accepts `none`.
    """
    if effort is None:
        return variables
    given = variables or {}
    if EFFORT in _variables(model):
        return {EFFORT: _known_effort(model, effort, param), **given}
    switched = thinking_variables(model, thinking=effort != "none")
    if not switched and effort == "none" and _reasoning(model) is None:
        return variables
    if not switched:
        raise _unsupported(f"the chat template of {model.name} has no such setting", param)
    return {**switched, **given}


def with_verbosity(
    model: ServedModel, variables: Mapping[str, Any] | None, verbosity: str | None
) -> Mapping[str, Any] | None:
    """Returns the template's variables with OpenAI's verbosity, a hint that few templates know."""
    if verbosity is None or VERBOSITY not in _variables(model):
        return variables
    return {VERBOSITY: verbosity, **(variables or {})}


def with_budget(
    model: ServedModel, variables: Mapping[str, Any] | None, sampling: SamplingParams
) -> Mapping[str, Any] | None:
    """Returns the template's variables with the limit of reasoning, which few templates tell the
    model."""
    budget = sampling.thinking_token_budget
    if budget is None or BUDGET not in _variables(model):
        return variables
    return {BUDGET: budget, **(variables or {})}


def without_thinking(
    model: ServedModel, variables: Mapping[str, Any] | None, sampling: SamplingParams
) -> Mapping[str, Any] | None:
    """Returns the variables for this sampling: a constrained output has no room to reason.

    Variables that the request sets are kept.
    """
    constraint = sampling.structured_outputs
    if constraint is None or may_reason(constraint):
        return variables
    return {**thinking_variables(model, thinking=False), **(variables or {})}


def thinking_variables(model: ServedModel, *, thinking: bool) -> Mapping[str, Any]:
    """Returns the variables that switch reasoning on or off, if the template has a switch."""
    known = _variables(model)
    return {name: thinking for name in SWITCHES if name in known}


def _known_effort(model: ServedModel, effort: str, param: str) -> str:
    if _reasoning(model) != OPENAI_GPTOSS:
        return effort
    if effort == "none":
        raise _unsupported(f"{model.name} cannot answer without reasoning; low is the least", param)
    return _GPTOSS_EFFORTS.get(effort, effort)


def _unsupported(reason: str, param: str) -> ApiError:
    return invalid(f"{param}: {reason}; leave it out.", param=param, code="unsupported_parameter")


def _reasoning(model: ServedModel) -> str | None:
    template = model.chat_template
    return None if template is None else detect_reasoning_parser(template.source)


def _variables(model: ServedModel) -> Set[str]:
    return frozenset() if model.chat_template is None else model.chat_template.variables
