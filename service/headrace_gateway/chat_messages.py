"""Chat messages and tools as OpenAI's requests have them, checked."""

from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    ConfigDict,
    StrictBool,
    StrictStr,
    StringConstraints,
    model_validator,
)

# What SDKs send back with an answer's message though it holds nothing.
_EMPTY_LISTS = frozenset({"tool_calls", "annotations"})

FunctionName = Annotated[
    str, StringConstraints(strict=True, min_length=1, max_length=128, pattern=r"^[\w.:/-]+$")
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


class TextPart(Body):
    type: Literal["text"]
    text: StrictStr


class FunctionCall(Body):
    name: StrictStr
    arguments: StrictStr


class ToolCall(Body):
    id: StrictStr | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


class Message(Body):
    """One message of a chat, as it was said by whoever or answered by a model before."""

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: StrictStr | list[TextPart] | None = None
    name: StrictStr | None = None
    reasoning_content: StrictStr | None = None
    reasoning: StrictStr | None = None
    tool_calls: list[ToolCall] | None = None
    tool_call_id: StrictStr | None = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        """SDKs send an answer's message back as it came, with every empty field."""
        if isinstance(value, dict):
            return {
                name: item
                for name, item in value.items()
                if item is not None and not (item == [] and name in _EMPTY_LISTS)
            }
        return value

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        if self.content is None and self.tool_calls is None:
            raise ValueError("a message needs content")
        return self


class FunctionDefinition(Body):
    """`parameters` is a JSON schema; `strict` asks for arguments that match it."""

    name: FunctionName
    description: StrictStr | None = None
    parameters: dict[str, Any] | None = None
    strict: StrictBool | None = None


class Tool(Body):
    type: Literal["function"]
    function: FunctionDefinition


class ToolName(Body):
    name: FunctionName


class NamedTool(Body):
    type: Literal["function"]
    function: ToolName


ToolChoice = Literal["none", "auto", "required"] | NamedTool
