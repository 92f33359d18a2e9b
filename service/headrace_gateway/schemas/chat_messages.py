"""Checks chat messages and tools in the form of OpenAI's requests."""

from dataclasses import dataclass, replace
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Discriminator,
    Field,
    StrictBool,
    StringConstraints,
    Tag,
    WithJsonSchema,
    model_validator,
)
from pydantic_core import PydanticCustomError

from ..errors import UNSUPPORTED_KIND
from ..limits.fields import FreeObject, Items, Name, Text

# Fields that SDKs send back with an answer's message although they are empty.
_EMPTY_LISTS = frozenset({"tool_calls", "annotations"})

MAX_TOOLS = 512
# Limits of one message.
MAX_PARTS = 4096
MAX_CALLS = 1024

FunctionName = Annotated[
    str, StringConstraints(strict=True, min_length=1, max_length=128, pattern=r"^[\w.:/-]+$")
]


class Body(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, protected_namespaces=())


def nothing_but(kind: str, reason: str) -> BeforeValidator:
    """Refuses values other than `kind`, which other servers support; the error has this reason."""

    def check(value: object) -> object:
        if isinstance(value, str) and value != kind:
            shown = {"value": value[:80], "reason": reason}
            raise PydanticCustomError(
                UNSUPPORTED_KIND, "'{value}' is not supported: {reason}", shown
            )
        return value

    return BeforeValidator(check)


def _form(value: object) -> str:
    if isinstance(value, list):
        return "list"
    return "dict" if isinstance(value, dict | BaseModel) else "str"


# Only the branch of a union with the tag that was sent is checked, so that its faults are reported
# and not those of the others.
BY_FORM = Discriminator(_form)


def _off(value: bool) -> bool:
    if value:
        raise PydanticCustomError(UNSUPPORTED_KIND, "true is not supported: leave it out")
    return value


# Values that OpenAI supports and this server does not; a Literal would accept 0 too.
Off = Annotated[
    StrictBool, AfterValidator(_off), WithJsonSchema({"type": "boolean", "const": False})
]


def only(*neutral: Any, reason: str) -> tuple[BeforeValidator, WithJsonSchema]:
    """Returns a type of field that accepts these values, which have no effect, and null."""

    def check(value: object) -> object:
        if any(type(value) is type(each) and value == each for each in (None, *neutral)):
            return value
        raise PydanticCustomError(
            UNSUPPORTED_KIND, "is not supported: {reason}", {"reason": reason}
        )

    return BeforeValidator(check), WithJsonSchema({"enum": [None, *neutral]})


NO_MEDIA = "this server reads text, images and frames of videos only"
NO_SERVER_TOOLS = "this server runs no tools itself; give functions, and run them where you are"
NO_TOOL_SEARCH = "there is no search for tools: give those that the model may call now"
NO_SUCH_CHOICE = "it is none, auto, required, a function by name, or allowed_tools"


class TextPart(Body):
    """`prompt_cache_breakpoint` has no effect: prompts are cached by their content."""

    type: Annotated[Literal["text"], nothing_but("text", NO_MEDIA)]
    text: Text
    prompt_cache_breakpoint: FreeObject | None = None


class ImageUrl(Body):
    """`detail` has no effect: the model's own processor decides the size."""

    url: Text
    detail: Literal["auto", "low", "high", "original"] | None = None


class VideoUrl(Body):
    """A video as its frames: data:video/jpeg;base64, and then each as JPEG, with commas between."""

    url: Text


class UploadedFile(Body):
    """`file_id` names an image that was uploaded to /v1/files. `filename` has no effect."""

    file_data: Annotated[Any, *only(reason="send an image_url with a data: URL")] = None
    file_id: Name
    filename: Name | None = None


@dataclass(frozen=True, slots=True)
class ImageSource:
    """Where an image of a request is, with `video` a video: at a URL, or else in an uploaded file.

    `name` is the name of the field with it, for errors.
    """

    name: str
    url: str | None = None
    file_id: str | None = None
    video: bool = False


class ImagePart(Body):
    """An image or a video for models that read them; templates call it `kind`."""

    kind: ClassVar[str] = "image"

    def source(self, place: str) -> ImageSource:
        """Returns where the image is; `place` is the name of this part."""
        raise NotImplementedError


class ImageUrlPart(ImagePart):
    type: Literal["image_url"]
    image_url: ImageUrl
    prompt_cache_breakpoint: FreeObject | None = None

    def source(self, place: str) -> ImageSource:
        return ImageSource(f"{place}.image_url.url", url=self.image_url.url)


class VideoUrlPart(ImagePart):
    kind: ClassVar[str] = "video"
    type: Literal["video_url"]
    video_url: VideoUrl
    prompt_cache_breakpoint: FreeObject | None = None

    def source(self, place: str) -> ImageSource:
        return ImageSource(f"{place}.video_url.url", url=self.video_url.url, video=True)


class ImageFilePart(ImagePart):
    type: Literal["file"]
    file: UploadedFile
    prompt_cache_breakpoint: FreeObject | None = None

    def source(self, place: str) -> ImageSource:
        return ImageSource(f"{place}.file.file_id", file_id=self.file.file_id)


class _Foreign(BaseModel):
    """A part of another API, whose field was called `field`."""

    field: str = Field(exclude=True, max_length=256)


class _ForeignImageUrlPart(_Foreign, ImageUrlPart):
    def source(self, place: str) -> ImageSource:
        return replace(super().source(place), name=self.field)


class _ForeignImageFilePart(_Foreign, ImageFilePart):
    def source(self, place: str) -> ImageSource:
        return replace(super().source(place), name=self.field)


def image_part(url: str, field: str) -> ImagePart:
    """Returns an image of another API in a chat's form; errors call it `field`."""
    return _ForeignImageUrlPart(type="image_url", image_url=ImageUrl(url=url), field=field)


def file_part(file_id: str, field: str) -> ImagePart:
    """Returns an uploaded image of another API in a chat's form; errors call it `field`."""
    return _ForeignImageFilePart(type="file", file=UploadedFile(file_id=file_id), field=field)


_IMAGE_KINDS = {"image_url": "image part", "video_url": "video part", "file": "file part"}


def _part_kind(value: object) -> str:
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return _IMAGE_KINDS.get(kind, "text part") if isinstance(kind, str) else "text part"


# Their tags are no names of fields, so that errors leave them out.
Part = Annotated[
    Annotated[TextPart, Tag("text part")]
    | Annotated[ImageUrlPart, Tag("image part")]
    | Annotated[VideoUrlPart, Tag("video part")]
    | Annotated[ImageFilePart, Tag("file part")],
    Discriminator(_part_kind),
]


class FunctionCall(Body):
    name: Name
    arguments: Text


class ToolCall(Body):
    id: Name | None = None
    type: Literal["function"] = "function"
    function: FunctionCall


Content = Annotated[
    Annotated[Text, Tag("str")] | Annotated[Items[Part], Field(max_length=MAX_PARTS), Tag("list")],
    BY_FORM,
]


class Message(Body):
    """One message of a chat, of any role, or an answer that comes back.

    `refusal` is what another server's model said instead of an answer.
    """

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: Content | None = None
    name: Name | None = None
    reasoning_content: Text | None = None
    reasoning: Text | None = None
    tool_calls: Items[ToolCall] | None = Field(None, max_length=MAX_CALLS)
    tool_call_id: Name | None = None
    refusal: Text | None = None
    audio: Annotated[Any, *only(reason=NO_MEDIA)] = None
    function_call: Annotated[Any, *only(reason="use tool_calls")] = None

    @model_validator(mode="before")
    @classmethod
    def _null_is_absent(cls, value: Any) -> Any:
        """Removes empty fields: SDKs send an answer's message back as it came, with all of them.

        Some scripts send only the content back, which is null if all of the answer was reasoning.
        """
        if not isinstance(value, dict):
            return value
        given = {
            name: item
            for name, item in value.items()
            if item is not None and not (item == [] and name in _EMPTY_LISTS)
        }
        if given == {"role": "assistant"} and "content" in value:
            return {**given, "content": ""}
        return given

    @model_validator(mode="after")
    def _says_something(self) -> "Message":
        """Checks that a message has content. An answer that was cut off may have only reasoning."""
        others = self.reasoning_content or self.reasoning or self.refusal
        if self.content is None and self.tool_calls is None and not others:
            raise ValueError("a message needs content")
        return self


class FunctionDefinition(Body):
    """`parameters` is a JSON schema; `strict` asks for arguments that match it."""

    name: FunctionName
    description: Text | None = None
    parameters: FreeObject | None = None
    strict: StrictBool | None = None


class Tool(Body):
    type: Annotated[Literal["function"], nothing_but("function", NO_SERVER_TOOLS)]
    function: FunctionDefinition


def function_tool(
    name: str,
    description: str | None,
    parameters: dict[str, Any] | None,
    strict: bool | None,
) -> Tool:
    """Returns a tool of another API in a chat's form."""
    function = FunctionDefinition(
        name=name, description=description, parameters=parameters, strict=strict
    )
    return Tool(type="function", function=function)


def _choice_form(value: object) -> str:
    """Returns the tag of a choice, as it was sent or already checked."""
    kind = value.get("type") if isinstance(value, dict) else getattr(value, "type", None)
    return "allowed" if kind == "allowed_tools" else _form(value)


BY_CHOICE = Discriminator(_choice_form)


class ToolName(Body):
    name: FunctionName


class NamedTool(Body):
    type: Annotated[Literal["function"], nothing_but("function", NO_SUCH_CHOICE)]
    function: ToolName


def named_tool(name: str) -> NamedTool:
    """Returns the choice of the tool with this name, in a chat's form."""
    return NamedTool(type="function", function=ToolName(name=name))


class AllowedTools(Body):
    mode: Literal["auto", "required"]
    tools: Items[NamedTool] = Field(min_length=1, max_length=MAX_TOOLS)


class AllowedToolChoice(Body):
    """Allows only these tools, as if the others had not been given."""

    type: Literal["allowed_tools"]
    allowed_tools: AllowedTools


Mode = Literal["none", "auto", "required"]
ToolMode = Annotated[Mode, Tag("str")]
ToolChoice = Annotated[
    ToolMode | Annotated[NamedTool, Tag("dict")] | Annotated[AllowedToolChoice, Tag("allowed")],
    BY_CHOICE,
]
