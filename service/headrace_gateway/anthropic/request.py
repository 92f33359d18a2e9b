"""Turns a body of /v1/messages into a chat: messages, tools and sampling."""

import json
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_common.sampling.params import SamplingParams
from headrace_common.structured.structured import StructuredOutputError, StructuredOutputsParams

from ..errors import invalid
from ..models.models import ServedModel
from ..openai.opaque_reasoning import UnreadableReasoning, unseal
from ..openai.transcript import Role, Transcript, joined, text_part
from ..parsing.chat_output import Tooling, tooling
from ..parsing.template_variables import thinking_variables, with_effort
from ..schemas.chat_messages import (
    ImagePart,
    Message,
    TextPart,
    function_tool,
    named_tool,
)
from ..schemas.structured_fields import refused
from .schemas import (
    CountTokensRequest,
    ImageBlock,
    MessageParam,
    MessagesRequest,
    NamedToolChoice,
    TextBlock,
    ThinkingBlock,
    ThinkingOn,
    ToolResultBlock,
    ToolUseBlock,
)

Conversation = MessagesRequest | CountTokensRequest

_CHOICES: Mapping[str, Any] = {"auto": "auto", "any": "required", "none": "none"}


def messages_of(body: Conversation) -> list[Message]:
    """Returns the conversation as chat messages. Raises ApiError."""
    transcript = Transcript()
    if body.system:
        transcript.say("system", _text(body.system))
    for index, message in enumerate(body.messages):
        _add(message, transcript, f"messages[{index}]")
    return transcript.messages()


def continues_last_message(body: Conversation) -> bool:
    """Whether the last message is the beginning of the answer, which the model continues."""
    return body.messages[-1].role == "assistant"


def tooling_of(body: Conversation) -> Tooling:
    """Returns the request's tools. Raises ApiError."""
    tools = [
        function_tool(tool.name, tool.description, tool.schema_shown, tool.strict)
        for tool in body.tools or ()
    ]
    choice = body.tool_choice
    if choice is None:
        return tooling(tools, None)
    parallel = not choice.disable_parallel_tool_use
    if isinstance(choice, NamedToolChoice):
        return tooling(tools, named_tool(choice.name), parallel=parallel)
    return tooling(tools, _CHOICES[choice.type], parallel=parallel)


def variables_of(body: Conversation, model: ServedModel) -> Mapping[str, Any] | None:
    """Returns the chat template's variables.

    They turn reasoning off unless the request asks for it, as in Anthropic's API.
    """
    thinking = isinstance(body.thinking, ThinkingOn)
    given = {**thinking_variables(model, thinking=thinking), **(body.chat_template_kwargs or {})}
    effort = None if body.output_config is None else body.output_config.effort
    return with_effort(model, given, effort, "output_config.effort")


def omits_thinking(body: MessagesRequest) -> bool:
    """Whether the answer shows no reasoning and carries it only in signatures."""
    return isinstance(body.thinking, ThinkingOn) and body.thinking.display == "omitted"


def sampling_of(body: MessagesRequest, *, reasons: bool) -> SamplingParams:
    """Returns the sampling parameters. Raises SamplingError and ApiError.

    `reasons` says whether the model reasons; only then is a thinking budget set.
    """
    names = ("temperature", "top_p", "top_k", "min_p", "seed")
    given = {name: getattr(body, name) for name in names if getattr(body, name) is not None}
    return SamplingParams(
        **given,
        max_tokens=body.max_tokens,
        stop=tuple(body.stop_sequences or ()),
        structured_outputs=_structured(body),
        thinking_token_budget=_budget(body) if reasons else None,
    )


def _budget(body: MessagesRequest) -> int | None:
    return body.thinking.budget_tokens if isinstance(body.thinking, ThinkingOn) else None


def _structured(body: MessagesRequest) -> StructuredOutputsParams | None:
    if body.output_config is None or body.output_config.format is None:
        return None
    try:
        return StructuredOutputsParams(json=body.output_config.format.schema_)
    except StructuredOutputError as error:
        raise refused("output_config.format", error) from error


def _add(message: MessageParam, transcript: Transcript, place: str) -> None:
    parts: list[TextPart | ImagePart] = []
    for index, block in enumerate(message.content):
        match block:
            case TextBlock() if message.role != "assistant":
                parts.append(text_part(block.text))
            case ImageBlock() if message.role == "user":
                parts.append(_image(block, f"{place}.content[{index}]"))
            case TextBlock():
                transcript.answer(block.text)
            case ToolResultBlock() if message.role == "user":
                where = f"{place}.content[{index}].content"
                transcript.result(block.tool_use_id, joined(_parts(block.content, where)))
            case ThinkingBlock() if message.role == "assistant":
                transcript.reason(_thought(block))
            case ToolUseBlock() if message.role == "assistant":
                arguments = json.dumps(block.input, ensure_ascii=False)
                transcript.call(block.id, block.name, arguments)
            case _:
                where = f"{place}.content[{index}].type"
                raise invalid(
                    f"{where}: a message of the {message.role} cannot contain {block.type}.",
                    param=where,
                )
    if parts:
        role: Role = "system" if message.role == "system" else "user"
        transcript.say(role, joined(parts))


def _parts(content: Sequence[TextBlock | ImageBlock], place: str) -> list[TextPart | ImagePart]:
    return [
        text_part(block.text)
        if isinstance(block, TextBlock)
        else _image(block, f"{place}[{index}]")
        for index, block in enumerate(content)
    ]


def _image(block: ImageBlock, place: str) -> ImagePart:
    return block.source.chat_part(f"{place}.source")


def _thought(block: ThinkingBlock) -> str:
    """Returns the reasoning in a block; "" if it is in a signature that another server made."""
    if block.thinking or not block.signature:
        return block.thinking
    try:
        return unseal(block.signature)
    except UnreadableReasoning:
        return ""


def _text(content: Sequence[TextBlock]) -> str:
    return "\n".join(block.text for block in content)
