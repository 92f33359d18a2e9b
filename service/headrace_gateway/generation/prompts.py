"""Turns prompts into token ids: chats by the model's template, completions in their four forms.

Long texts are tokenised in threads (the tokenizer releases the interpreter's lock), so that one
request does not delay the streams of others.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

import pydantic_core

from headrace_common.images.layout import ImageFormat, ImageLayout, PlaceholderMismatch, expand
from headrace_common.text.chat_template import ChatTemplate
from headrace_common.text.long_text import PIECE_CHARS, NoCut
from headrace_common.wire.images import ImageData, ImageSpan

from ..errors import ApiError, invalid, too_long
from ..images.intake import ImageIntake
from ..images.read_images import ReadImage, ReadVideo
from ..limits.budget import Budget
from ..limits.json_shape import TOO_COMPLEX, check_shape
from ..limits.work import Work, check_wanted, size_of
from ..models.models import ServedModel
from ..parsing.harmony.header import is_harmony
from ..parsing.harmony.messages import described, writable
from ..schemas.chat_messages import ImagePart, ImageSource, Message, TextPart
from .rendering import Rendering

# The cost of a message, of a part of one, or of a call, in characters.
OBJECT_CHARS = 64
# What an image, or a group of a video's frames, is and how the model reads it.
PlacedImage = tuple[ImageData, ImageLayout]
# A query is tokenised again for each document, so a request can have more text than its body.
MAX_PAIR_CHARS = 2**21
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    """How a chat becomes a prompt. `videos` are the numbers of frames of its videos, of which
    `video_fps` are a second."""

    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None
    video_fps: float = 1.0
    videos: Sequence[int] = ()


@dataclass(frozen=True, slots=True)
class Prompt:
    """A chat's prompt. Its images are named by their content; see Job."""

    token_ids: list[int]
    images: tuple[ImageSpan, ...] = ()

    def __len__(self) -> int:
        return len(self.token_ids)


class PromptEncoder:
    """Makes token ids. Raises ApiError for a prompt that no engine can run, whatever its length."""

    def __init__(self, work: Work, rendering: Rendering, images: ImageIntake) -> None:
        self._work = work
        self._rendering = rendering
        self._images = images

    async def chat(
        self,
        model: ServedModel,
        messages: Sequence[Message],
        options: ChatOptions,
        context: int | None = None,
    ) -> Prompt:
        """Returns a chat's prompt. Refuses early what is surely longer than `context` tokens."""
        sources = list(_image_sources(messages))
        if not sources:
            return Prompt(await self._token_ids(model, messages, options, context))
        form = _image_format(model, sources)
        read = await self._images.read(sources, self._work)
        images = await self._placed(form, read, options.video_fps)
        videos = [len(each.frames) for each in read if isinstance(each, ReadVideo)]
        ids = await self._token_ids(model, messages, replace(options, videos=videos), context)
        return await self._work.run(len(ids), partial(_with_images, form, ids, images))

    async def alone(
        self,
        model: ServedModel,
        messages: Sequence[Message],
        *,
        add_special_tokens: bool,
        context: int | None = None,
    ) -> Prompt:
        """Returns the prompt of a message for a model that embeds an image or a text alone."""
        sources = list(_image_sources(messages))
        text = "".join(_texts(messages))
        if len(sources) > 1 or (sources and text) or not (sources or text):
            raise invalid(
                f"messages: the model {model.name} embeds one image or one text: send either.",
                param="messages",
            )
        late = model.late_interaction
        if not sources:
            (ids,) = await self.completion(
                model,
                text if late is None else late.query(text),
                add_special_tokens=late is None and add_special_tokens,
                max_prompts=1,
                context=context,
                name="messages",
            )
            return Prompt(ids)
        form = _image_format(model, sources)
        images = await self._placed(form, await self._images.read(sources, self._work))
        ids = [form.placeholder]
        if late is not None:
            ids = model.tokenizer.encode(late.image_prompt, add_special_tokens=False)
        return _with_images(form, ids, images)

    async def _placed(
        self, form: ImageFormat, read: Sequence[ReadImage | ReadVideo], fps: float = 1.0
    ) -> list[PlacedImage]:
        placed: list[PlacedImage] = []
        for each in read:
            if isinstance(each, ReadImage):
                placed.append((each.data, each.layout(form)))
                continue
            assert form.video is not None
            for group, layout in each.groups(form.video, fps):
                placed.append((await self._images.hold(group.encode(), self._work), layout))
        return placed

    async def _token_ids(
        self,
        model: ServedModel,
        messages: Sequence[Message],
        options: ChatOptions,
        context: int | None,
    ) -> list[int]:
        """Returns the token ids of a chat, with one token for each image."""
        size = _chat_size(messages, options)
        if not model.rendered_in_worker:
            return await self._work.run(size, partial(_chat, model, messages, options, context))
        template = _template(model)
        chat, size = await self._work.run(
            size, partial(_protected, model, messages, options, context)
        )
        text = await self._rendering.render(template, chat, self._work.tenant)
        return await self._work.run(
            len(text), partial(_encoded, model, text, size, options, context)
        )

    async def completion(
        self,
        model: ServedModel,
        prompt: object,
        *,
        add_special_tokens: bool,
        max_prompts: int,
        context: int | None = None,
        name: str = "prompt",
    ) -> list[list[int]]:
        """Returns one list of ids for each prompt; errors call the field `name`."""
        prompts = _split(prompt, max_prompts, name)
        for _, single in prompts:
            if isinstance(single, str):
                _check_size(model, len(single), context)
        size = sum(len(single) for _, single in prompts if isinstance(single, str | list))

        def encode() -> list[list[int]]:
            return [
                _one(model, single, place, context, special=add_special_tokens)
                for place, single in prompts
            ]

        return await self._work.run(size, encode)

    async def pairs(
        self,
        model: ServedModel,
        pairs: Sequence[tuple[str, str]],
        *,
        context: int | None = None,
        name: str,
    ) -> list[list[int]]:
        """Returns the ids of each pair for a cross-encoder; errors call the field `name`."""
        sizes = [len(first) + len(second) for first, second in pairs]
        for size, limit in ((max(sizes), PIECE_CHARS), (sum(sizes), MAX_PAIR_CHARS)):
            if size > limit:
                which = "one pair" if limit == PIECE_CHARS else "all pairs"
                raise invalid(
                    f"{name}: {size} characters in {which} are over the limit of {limit}; each "
                    "pair has the whole query.",
                    param=name,
                )
        _check_size(model, max(sizes), context)
        return await self._work.run(
            sum(sizes), lambda: [_pair(model, first, second) for first, second in pairs]
        )

    async def text(self, model: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
        encode = partial(_text, model, text, "prompt", None, special=add_special_tokens)
        return await self._work.run(len(text), encode)

    async def decode(self, model: ServedModel, token_ids: list[int]) -> str:
        if token_ids:
            _check_ids(token_ids, model.tokenizer.model_vocab_size, "tokens")
        decode = partial(model.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self._work.run(len(token_ids), decode)


def _chat_size(messages: Sequence[Message], options: ChatOptions) -> int:
    """Counts characters, and some more for each object."""
    size = size_of(options.tools) + size_of(options.variables)
    for message in messages:
        size += OBJECT_CHARS + len(message.reasoning_content or message.reasoning or "")
        content = message.content
        if isinstance(content, list):
            size += sum(OBJECT_CHARS + len(_text_of(part)) for part in content)
        else:
            size += len(content or "")
        for call in message.tool_calls or ():
            size += OBJECT_CHARS + len(call.function.arguments)
    return size


def _chat(
    model: ServedModel, messages: Sequence[Message], options: ChatOptions, context: int | None
) -> list[int]:
    chat, size = _protected(model, messages, options, context)
    return _encoded(model, _template(model).render(**chat), size, options, context)


def _template(model: ServedModel) -> ChatTemplate:
    if model.chat_template is None:
        raise invalid(
            f"The model {model.name} has no chat template; use /v1/completions.",
            param="messages",
            code="chat_template_missing",
        )
    return model.chat_template


def _protected(
    model: ServedModel, messages: Sequence[Message], options: ChatOptions, context: int | None
) -> tuple[dict[str, Any], int]:
    """The arguments of ChatTemplate.render, and how many characters the messages have."""
    source = _template(model).source
    _check_options(options)
    _check_arguments(messages)
    plain = [_plain_message(message, developer="developer" in source) for message in messages]
    tools = options.tools
    if is_harmony(source):
        plain, tools = writable(plain), described(tools)
    size = sum(_length(message["content"]) for message in plain)
    _check_size(model, size, context)
    inputs = {"messages": plain, "tools": tools, "variables": options.variables}
    chat = {
        **{name: model.tokenizer.protect(value) for name, value in inputs.items()},
        "add_generation_prompt": options.add_generation_prompt,
        "continue_final_message": options.continue_final_message,
    }
    if model.images is not None and model.images.video is not None:
        chat["messages"] = model.images.video.show(chat["messages"])
    return chat, size


def _encoded(
    model: ServedModel, text: str, size: int, options: ChatOptions, context: int | None
) -> list[int]:
    special = options.add_special_tokens
    if model.images is not None:
        text = _with_videos(model.images, text, options)
    encode = partial(
        model.tokenizer.encode_protected,
        text,
        add_special_tokens=special,
        most=context,
        check=check_wanted,
    )
    return _not_empty(_within(encode, size, context, "messages"), "messages")


def _with_videos(form: ImageFormat, text: str, options: ChatOptions) -> str:
    """The text of a prompt as it is tokenised."""
    text = form.rewrite(text)
    if not options.videos or form.video is None:
        return text
    try:
        return form.video.write(text, [(count, options.video_fps) for count in options.videos])
    except PlaceholderMismatch as error:
        raise _no_place(error) from error


def _one(
    model: ServedModel, prompt: object, name: str, context: int | None, *, special: bool
) -> list[int]:
    check_wanted()
    if isinstance(prompt, str):
        return _not_empty(_text(model, prompt, name, context, special=special), name)
    assert isinstance(prompt, list)
    _check_ids(prompt, model.tokenizer.model_vocab_size, name)
    return prompt


def _pair(model: ServedModel, first: str, second: str) -> list[int]:
    check_wanted()
    return model.tokenizer.encode_pair(first, second)


def _text(
    model: ServedModel, text: str, name: str, context: int | None, *, special: bool
) -> list[int]:
    encode = partial(
        model.tokenizer.encode,
        text,
        add_special_tokens=special,
        most=context,
        check=check_wanted,
    )
    return _within(encode, len(text), context, name)


def _within(
    encode: Callable[[], list[int]], size: int, context: int | None, name: str
) -> list[int]:
    """Returns the ids of a text of `size` characters; if it is too long, only enough to tell."""
    try:
        ids = encode()
    except NoCut as error:
        raise invalid(f"{name}: {error}.", param=name, code=TOO_COMPLEX) from error
    if context is not None and len(ids) > context and size > PIECE_CHARS // 2:
        raise too_long(context, f"at least {len(ids)} tokens in the prompt")
    return ids


def _check_size(model: ServedModel, chars: int, context: int | None) -> None:
    if context is None:
        return
    least = chars // model.tokenizer.max_token_chars
    if least > context:
        raise too_long(context, f"at least {least} tokens in the prompt")


def _split(prompt: object, max_prompts: int, name: str) -> list[tuple[str, object]]:
    """Returns the single prompts in `prompt`, each with the name that errors use for it."""
    if isinstance(prompt, str):
        return [(name, prompt)]
    if not isinstance(prompt, list):
        raise invalid(f"{name}: must be text, token ids, or a list of either.", param=name)
    if not prompt:
        raise invalid(f"{name}: must not be empty.", param=name)
    if not isinstance(prompt[0], str | list):
        return [(name, prompt)]
    if len(prompt) > max_prompts:
        raise invalid(
            f"{name}: {len(prompt)} prompts exceed the limit of {max_prompts} per request. Split "
            "the request.",
            param=name,
        )
    kind = type(prompt[0])
    for index, single in enumerate(prompt):
        if type(single) is not kind:
            raise invalid(
                f"{name}[{index}]: texts and token ids cannot be mixed.", param=f"{name}[{index}]"
            )
    return [(f"{name}[{index}]", single) for index, single in enumerate(prompt)]


def _check_ids(ids: list[Any], vocab_size: int, name: str) -> None:
    _not_empty(ids, name)
    if set(map(type, ids)) == {int} and min(ids) >= 0 and max(ids) < vocab_size:
        return
    for index, token_id in enumerate(ids):
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise invalid(
                f"{name}[{index}]: a token id is a whole number from 0 to {vocab_size - 1}, "
                f"not {token_id!r:.40}.",
                param=name,
            )


def _not_empty(ids: list[int], name: str) -> list[int]:
    if not ids:
        raise invalid(f"{name}: the prompt has no tokens.", param=name)
    return ids


def _check_options(options: ChatOptions) -> None:
    if options.continue_final_message and options.add_generation_prompt:
        raise invalid(
            "continue_final_message needs add_generation_prompt: false.",
            param="continue_final_message",
        )
    reserved = RESERVED_VARIABLES & (options.variables or {}).keys()
    if reserved:
        raise invalid(
            f"chat_template_kwargs: {sorted(reserved)[0]} cannot be set here.",
            param="chat_template_kwargs",
        )


def _plain_message(message: Message, *, developer: bool) -> dict[str, Any]:
    """Returns a message as templates know it: text is one string, a call's arguments are data.

    Text parts are joined before special tokens are looked for, so that two parts cannot form one.
    """
    content = _plain_content(message.content)
    reasoning = message.reasoning_content or message.reasoning
    if content is None:
        content = message.refusal
    if content is None and message.tool_calls is None:
        content = ""  # otherwise templates would write None
    role = "system" if message.role == "developer" and not developer else message.role
    fields = message.model_dump(exclude_none=True, exclude={"content", "reasoning", "refusal"})
    plain = {**fields, "role": role, "content": content}
    if reasoning is not None:
        plain["reasoning_content"] = reasoning
    if message.tool_calls is not None:
        plain["tool_calls"] = [
            {
                "id": call.id,
                "type": call.type,
                "function": {
                    "name": call.function.name,
                    "arguments": _arguments(call.function.arguments),
                },
            }
            for call in message.tool_calls
        ]
    return plain


def _plain_content(
    content: str | Sequence[TextPart | ImagePart] | None,
) -> str | list[dict[str, str]] | None:
    """Returns a content as templates know it: one text, or parts if some are images."""
    if content is None or isinstance(content, str):
        return content
    parts: list[dict[str, str]] = []
    for part in content:
        if isinstance(part, ImagePart):
            parts.append({"type": part.kind})
        elif parts and parts[-1]["type"] == "text":
            parts[-1]["text"] += "\n" + part.text
        else:
            parts.append({"type": "text", "text": part.text})
    if all(part["type"] == "text" for part in parts):
        return "".join(part["text"] for part in parts)
    return parts


def _text_of(part: TextPart | ImagePart) -> str:
    return part.text if isinstance(part, TextPart) else ""


def _length(content: str | Sequence[Mapping[str, str]] | None) -> int:
    """Counts the characters of a content as templates know it."""
    if content is None or isinstance(content, str):
        return len(content or "")
    return sum(len(part.get("text", "")) for part in content)


def _image_sources(messages: Sequence[Message]) -> Iterator[ImageSource]:
    """Yields where each image of a chat is."""
    for index, message in enumerate(messages):
        if isinstance(message.content, list):
            for number, part in enumerate(message.content):
                if isinstance(part, ImagePart):
                    yield part.source(f"messages[{index}].content[{number}]")


def _texts(messages: Sequence[Message]) -> Iterator[str]:
    for message in messages:
        if isinstance(message.content, list):
            yield from (part.text for part in message.content if isinstance(part, TextPart))
        else:
            yield message.content or ""


def _image_format(model: ServedModel, sources: Sequence[ImageSource]) -> ImageFormat:
    """How the model reads what `sources` name. Raises ApiError if it reads none of that kind."""
    form = model.images
    for source in sources:
        if form is None or (source.video and form.video is None):
            kind = "a video" if source.video else "an image"
            reads = "text only" if form is None else "text and images only"
            raise invalid(
                f"{source.name}: {kind} is not supported: the model {model.name} reads {reads}.",
                param=source.name,
                code="unsupported_parameter",
            )
    assert form is not None
    return form


def _with_images(form: ImageFormat, ids: Sequence[int], images: Sequence[PlacedImage]) -> Prompt:
    """Puts the tokens of the images in their places."""
    layouts = [(data.content, layout) for data, layout in images]
    try:
        expanded, spans = expand(form.placeholders, ids, layouts)
    except PlaceholderMismatch as error:
        raise _no_place(error) from error
    placed = zip(spans, images, strict=True)
    return Prompt(expanded, tuple(replace(span, data=data) for span, (data, _) in placed))


def _no_place(error: PlaceholderMismatch) -> ApiError:
    return invalid(
        "messages: the model's chat template shows no image or video in a message of this role: "
        f"{error}.",
        param="messages",
        code="chat_template_error",
    )


def _check_arguments(messages: Sequence[Message]) -> None:
    """Checks that all arguments together fit the budget of one body."""
    texts = [call.function.arguments for each in messages for call in each.tool_calls or ()]
    check_shape("\n".join(texts).encode(), Budget())


def _arguments(text: str) -> Any:
    try:
        return pydantic_core.from_json(text) if text else {}
    except ValueError as error:
        raise invalid(
            f"tool_calls: function.arguments is not valid JSON: {error}.", param="messages"
        ) from error
