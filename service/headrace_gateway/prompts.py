"""Prompts to token ids: chats through the model's template, completions in their four forms.

Long texts are worked on in threads (the tokenizer lets others run meanwhile), so that one request
never holds up the streams of all others.
"""

import asyncio
import json
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass
from functools import partial
from typing import Any, TypeVar

from headrace_common.chat_template import encode_chat

from .chat_messages import Message
from .errors import invalid, too_long
from .harmony.header import is_harmony
from .harmony.messages import described, writable
from .models import ServedModel

# Tokenising takes about a millisecond for this many characters.
INLINE_CHARS = 4096
RESERVED_VARIABLES = frozenset(
    {"messages", "tools", "documents", "add_generation_prompt", "continue_final_message"}
)

Result = TypeVar("Result")


@dataclass(frozen=True, slots=True, kw_only=True)
class ChatOptions:
    add_generation_prompt: bool = True
    continue_final_message: bool = False
    add_special_tokens: bool = False
    variables: Mapping[str, Any] | None = None
    tools: Sequence[Mapping[str, Any]] | None = None


class PromptEncoder:
    """Raises ApiError for a prompt that no engine could run, whatever its length."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor

    async def chat(
        self,
        model: ServedModel,
        messages: Sequence[Message],
        options: ChatOptions,
        context: int | None = None,
    ) -> list[int]:
        """`context` in tokens: what is surely longer is refused before it costs anything."""
        if model.chat_template is None:
            raise invalid(
                f"The model {model.name} has no chat template; use /v1/completions.",
                param="messages",
                code="chat_template_missing",
            )
        _check_options(options)
        developer = "developer" in model.chat_template.source
        plain = [_plain_message(message, developer=developer) for message in messages]
        tools = options.tools
        if is_harmony(model.chat_template.source):
            plain, tools = writable(plain), described(tools)
        encode = partial(
            encode_chat,
            model.tokenizer,
            model.chat_template,
            plain,
            tools=tools,
            variables=options.variables,
            add_special_tokens=options.add_special_tokens,
            add_generation_prompt=options.add_generation_prompt,
            continue_final_message=options.continue_final_message,
        )
        size = sum(len(message["content"] or "") for message in plain)
        _check_size(model, size, context)
        size += len(json.dumps(options.tools)) if options.tools else 0
        return _not_empty(await self._run(size, encode), "messages")

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
        """One list of ids a prompt; `context` as for chats. `name` is the field's, for errors."""
        prompts = _split(prompt, max_prompts, name)
        for _, single in prompts:
            if isinstance(single, str):
                _check_size(model, len(single), context)
        return [
            await self._one(model, single, place, add_special_tokens=add_special_tokens)
            for place, single in prompts
        ]

    async def text(self, model: ServedModel, text: str, *, add_special_tokens: bool) -> list[int]:
        encode = partial(model.tokenizer.encode, text, add_special_tokens=add_special_tokens)
        return await self._run(len(text), encode)

    async def decode(self, model: ServedModel, token_ids: list[int]) -> str:
        if token_ids:
            _check_ids(token_ids, model.tokenizer.model_vocab_size, "tokens")
        decode = partial(model.tokenizer.decode, token_ids, skip_special_tokens=False)
        return await self._run(len(token_ids), decode)

    async def _one(
        self, model: ServedModel, prompt: object, name: str, *, add_special_tokens: bool
    ) -> list[int]:
        if isinstance(prompt, str):
            ids = await self.text(model, prompt, add_special_tokens=add_special_tokens)
            return _not_empty(ids, name)
        assert isinstance(prompt, list)
        _check_ids(prompt, model.tokenizer.model_vocab_size, name)
        return prompt

    async def _run(self, size: int, work: Callable[[], Result]) -> Result:
        if size <= INLINE_CHARS:
            return work()
        return await asyncio.get_running_loop().run_in_executor(self._executor, work)


def _check_size(model: ServedModel, chars: int, context: int | None) -> None:
    if context is None:
        return
    least = chars // model.tokenizer.max_token_chars
    if least > context:
        raise too_long(context, f"at least {least} tokens in the prompt")


def _split(prompt: object, max_prompts: int, name: str) -> list[tuple[str, object]]:
    """The single prompts in `prompt`, each with the name under which to complain about it."""
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
            f"{name}: {len(prompt)} prompts are over the limit of {max_prompts} a request.",
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
    """A message as templates know it: text is one string, a call's arguments are data.

    Text parts are joined before special tokens are looked for, so that none can be put together
    from two of them.
    """
    content = message.content
    if isinstance(content, list):
        content = "\n".join(part.text for part in content)
    reasoning = message.reasoning_content or message.reasoning
    if content is None:
        content = message.refusal
    if content is None and message.tool_calls is None:
        content = ""  # templates would write None
    role = "system" if message.role == "developer" and not developer else message.role
    fields = message.model_dump(exclude_none=True, exclude={"reasoning", "refusal"})
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


def _arguments(text: str) -> Any:
    try:
        return json.loads(text) if text else {}
    except (ValueError, RecursionError) as error:
        raise invalid(
            f"tool_calls: function.arguments is not valid JSON: {error}.", param="messages"
        ) from error
