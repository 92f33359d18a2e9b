"""Turns input items of /v1/responses into chat messages."""

from collections.abc import Collection, Mapping
from typing import Annotated, Any, Literal

from pydantic import AfterValidator, Discriminator, Field, Tag, model_validator
from pydantic_core import PydanticCustomError

from ...errors import invalid
from ...limits.fields import FreeObject, Items, Name, Text
from ...schemas import chat_messages
from ...schemas.chat_messages import BY_FORM, MAX_PARTS, Body, file_part, image_part, only
from ...schemas.completions import MAX_MESSAGES, checked
from ..opaque_reasoning import UnreadableReasoning, unseal
from ..transcript import Parts, Transcript, joined, text_part
from .schemas import NO_ASYNC_CALLS, NO_CALLS_BY_PROGRAMS, NO_NAMESPACES

# Citations, or log probabilities of tokens, as in an answer's text.
MAX_ANNOTATIONS = 2**16
_NO_MEDIA = "this endpoint reads text and images only"
_NO_IMAGES = "this model reads text only"
_TEXT_PARTS = ("input_text", "output_text", "text", "reasoning_text", "summary_text")
_IMAGE_PART = "input_image"


class _Item(Body):
    """`id` and `status` come back with an answer's items, and have no effect."""

    id: Name | None = None
    status: Name | None = None


class TextPart(Body):
    """`prompt_cache_breakpoint` has no effect: prompts are cached by their content."""

    type: Literal["input_text", "output_text", "text", "reasoning_text", "summary_text"]
    text: Text
    annotations: list[Any] = Field(default_factory=list, max_length=MAX_ANNOTATIONS)
    logprobs: list[Any] = Field(default_factory=list, max_length=MAX_ANNOTATIONS)
    prompt_cache_breakpoint: FreeObject | None = None


class ImagePart(Body):
    """`detail` has no effect: the model's own processor decides the size."""

    type: Literal["input_image"]
    file_id: Name | None = None
    image_url: Text | None = None
    detail: Literal["auto", "low", "high", "original"] | None = None
    prompt_cache_breakpoint: FreeObject | None = None

    @model_validator(mode="after")
    def _is_somewhere(self) -> "ImagePart":
        if (self.file_id is None) == (self.image_url is None):
            raise ValueError("an image is at image_url, or in the file file_id: give one of both")
        return self

    def chat_part(self, place: str) -> chat_messages.ImagePart:
        """Returns the image in a chat's form; `place` is the name of this part."""
        if self.file_id is not None:
            return file_part(self.file_id, f"{place}.file_id")
        return image_part(self.image_url or "", f"{place}.image_url")


def _part_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "image part" if kind == _IMAGE_PART else "text part"


_Parts = Annotated[Items[TextPart], Field(max_length=MAX_PARTS)]
# Their tags are no names of fields, so that errors leave them out.
_Part = Annotated[
    Annotated[TextPart, Tag("text part")] | Annotated[ImagePart, Tag("image part")],
    Discriminator(_part_kind),
]
_MixedParts = Annotated[Items[_Part], Field(max_length=MAX_PARTS)]
Content = Annotated[Annotated[Text, Tag("str")] | Annotated[_MixedParts, Tag("list")], BY_FORM]


class MessageItem(_Item):
    """`phase` comes back with answers of models that separate remarks from answers."""

    type: Literal["message"] = "message"
    role: Literal["system", "developer", "user", "assistant"]
    content: Content
    phase: Name | None = None


class _OfTool(_Item):
    caller: Annotated[Any, *only({"type": "direct"}, reason=NO_CALLS_BY_PROGRAMS)] = None
    namespace: Annotated[Any, *only(reason=NO_NAMESPACES)] = None


class CallItem(_OfTool):
    type: Literal["function_call"]
    call_id: Name
    name: Name = Field(min_length=1)
    arguments: Text
    async_: Annotated[Any, *only(False, reason=NO_ASYNC_CALLS)] = Field(None, alias="async")


class ResultItem(_OfTool):
    type: Literal["function_call_output"]
    call_id: Name
    output: Content
    name: Name | None = None


def _readable(sealed: str) -> str:
    try:
        unseal(sealed)
    except UnreadableReasoning as error:
        message = "is not of this server, or was changed: leave the item out"
        raise PydanticCustomError("invalid_encrypted_content", message) from error
    return sealed


class ReasoningItem(_Item):
    """Summaries are not read: the model said only what is in `content`, or in the opaque text."""

    type: Literal["reasoning"]
    summary: _Parts = Field(default_factory=list)
    content: _Parts = Field(default_factory=list)
    encrypted_content: Annotated[Text, AfterValidator(_readable)] | None = None

    @property
    def text(self) -> str:
        """The reasoning; the text in clear takes precedence."""
        if self.content or self.encrypted_content is None:
            return _text(self.content)
        return unseal(self.encrypted_content)


Item = MessageItem | CallItem | ResultItem | ReasoningItem
KINDS: Mapping[str, type[Item]] = {
    "message": MessageItem,
    "function_call": CallItem,
    "function_call_output": ResultItem,
    "reasoning": ReasoningItem,
}


def read_input(
    given: object, transcript: Transcript, *, lenient: bool = False, images: bool = False
) -> list[dict[str, Any]]:
    """Adds the input to the transcript; returns its items as they are stored. Raises ApiError.

    `lenient`: unknown fields are ignored. `images`: the model reads images.
    """
    if isinstance(given, str):
        given = [{"type": "message", "role": "user", "content": given}]
    if not isinstance(given, list) or not 0 < len(given) <= MAX_MESSAGES:
        raise invalid(f"input: must be text, or 1 to {MAX_MESSAGES} items.", param="input")
    items = [
        _checked(item, f"input[{index}]", lenient=lenient, images=images)
        for index, item in enumerate(given)
    ]
    for index, item in enumerate(items):
        add_item(item, transcript, f"input[{index}]")
    return [
        item.model_dump(exclude_none=True, exclude_defaults=True, by_alias=True) for item in items
    ]


def read_output(output: list[dict[str, Any]], transcript: Transcript) -> None:
    """Adds the items of an answer to the transcript."""
    for item in output:
        add_item(_checked(item, "output"), transcript, "output")


def add_item(item: Item, transcript: Transcript, place: str) -> None:
    """Adds an item; errors call it `place`."""
    match item:
        case MessageItem(role="assistant"):
            transcript.answer(_text(_only_text(item.content, f"{place}.content")))
        case MessageItem():
            role = item.role
            assert role != "assistant"
            transcript.say(role, _content(item.content, f"{place}.content"))
        case CallItem():
            transcript.call(item.call_id, item.name, item.arguments)
        case ResultItem():
            transcript.result(item.call_id, _content(item.output, f"{place}.output"))
        case ReasoningItem():
            transcript.reason(item.text)


def _content(content: str | list[TextPart | ImagePart], place: str) -> Parts:
    """Returns a content in a chat's form."""
    if isinstance(content, str):
        return content
    parts: list[chat_messages.TextPart | chat_messages.ImagePart] = [
        text_part(part.text) if isinstance(part, TextPart) else part.chat_part(f"{place}[{index}]")
        for index, part in enumerate(content)
    ]
    return joined(parts)


def _only_text(content: str | list[TextPart | ImagePart], place: str) -> str | list[TextPart]:
    if isinstance(content, str):
        return content
    for index, part in enumerate(content):
        if isinstance(part, ImagePart):
            where = f"{place}[{index}].type"
            raise invalid(f"{where}: an answer cannot contain {_IMAGE_PART}.", param=where)
    return [part for part in content if isinstance(part, TextPart)]


def _text(content: str | list[TextPart]) -> str:
    return content if isinstance(content, str) else "\n".join(part.text for part in content)


def _checked(item: object, place: str, *, lenient: bool = False, images: bool = False) -> Item:
    if not isinstance(item, dict):
        raise invalid(f"{place}: must be an object.", param=place)
    fields = {name: value for name, value in item.items() if value is not None}
    kind = fields.setdefault("type", "message")
    model = KINDS.get(kind) if isinstance(kind, str) else None
    if model is None:
        known = ", ".join(KINDS)
        raise invalid(
            f"{place}.type: {kind!r:.60} is not supported here; known are {known}.",
            param=f"{place}.type",
        )
    _check_parts(fields, place, (*_TEXT_PARTS, _IMAGE_PART) if images else _TEXT_PARTS)
    return checked(model, fields, lenient=lenient, place=place)


def _check_parts(fields: Mapping[str, Any], place: str, known: Collection[str]) -> None:
    for name in ("content", "output"):
        parts = fields.get(name)
        for index, part in enumerate(parts if isinstance(parts, list) else ()):
            kind = part.get("type") if isinstance(part, dict) else None
            if isinstance(kind, str) and kind not in known:
                where = f"{place}.{name}[{index}].type"
                reason = _NO_IMAGES if kind == _IMAGE_PART else _NO_MEDIA
                raise invalid(f"{where}: {kind!r:.60} is not supported: {reason}.", param=where)
