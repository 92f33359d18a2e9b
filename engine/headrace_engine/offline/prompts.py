"""Prompts of the offline API, in vLLM's forms."""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NotRequired, TypedDict

from ..core.errors import ConfigError, RequestError
from .media import Video, read_media, written
from .tokenizer import ChatTokenizer

if TYPE_CHECKING:
    from PIL.Image import Image


class TextPrompt(TypedDict):
    """A text. Prompts with different `cache_salt` share no cached prefixes. `multi_modal_data` is
    {"image": image}, or a list of images; the prompt has a placeholder for each. {"video": frames},
    or a list of videos, needs what the chat template writes for a video. A video is a list of
    images or an array, or a pair of them and {"fps": frames in a second}."""

    prompt: str
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]


class TokensPrompt(TypedDict):
    """Token ids; `prompt` may be their text, for the output. Other fields as in TextPrompt."""

    prompt_token_ids: list[int]
    prompt: NotRequired[str]
    cache_salt: NotRequired[str]
    multi_modal_data: NotRequired[Mapping[str, Any]]


Prompt = str | TextPrompt | TokensPrompt

_NAMES = frozenset({"prompt", "prompt_token_ids", "cache_salt", "multi_modal_data"})
# Fields that vLLM has and Headrace refuses, with what to use.
UNSUPPORTED_PROMPT = {
    "multi_modal_uuids": "images are known by their contents: leave it out",
    "mm_processor_kwargs": "images are read as preprocessor_config.json says: leave it out",
    "prompt_embeds": "send prompt or prompt_token_ids",
    "encoder_prompt": "models with an encoder and a decoder are not supported",
    "decoder_prompt": "models with an encoder and a decoder are not supported",
    "token_type_ids": "leave it out",
}


@dataclass(frozen=True, slots=True)
class ReadPrompt:
    """A prompt's tokens, and its text if it has one. Each image of `images`, and each group of
    frames that the model reads together, has one placeholder among the tokens."""

    text: str | None
    token_ids: list[int]
    cache_salt: str = ""
    images: tuple["Image | Video", ...] = ()


def read_prompt(
    prompt: Any, tokenizer: ChatTokenizer | None, *, special: bool = True
) -> ReadPrompt:
    """Reads any form of a prompt. `special`: texts get the tokenizer's special tokens.

    Raises RequestError for a form or a field that is not supported, and ConfigError for a text
    without a tokenizer.
    """
    if isinstance(prompt, str):
        return read_prompt({"prompt": prompt}, tokenizer, special=special)
    if not isinstance(prompt, Mapping):
        raise _not_a_prompt(prompt)
    _check_names(prompt)
    salt = prompt.get("cache_salt") or ""
    if not isinstance(salt, str):
        raise RequestError(f"cache_salt must be a text, not {salt!r:.60}")
    text = prompt.get("prompt")
    data = prompt.get("multi_modal_data")
    images = () if data is None else read_media(data)
    videos = [each for each in images if isinstance(each, Video)]
    if prompt.get("prompt_token_ids") is not None:
        if videos:
            raise RequestError("a prompt with videos must be a text")
        return ReadPrompt(text, list(prompt["prompt_token_ids"]), salt, images)
    if not isinstance(text, str):
        raise _not_a_prompt(prompt)
    if tokenizer is None:
        raise ConfigError("skip_tokenizer_init is set: send prompt_token_ids instead of a text")
    if not images:
        return ReadPrompt(text, tokenizer.encode(text, add_special_tokens=special), salt)
    if 0 < len(videos) < len(images) and tokenizer.has_one_placeholder:
        raise RequestError(
            "multi_modal_data: this model has one placeholder for images and videos: send a prompt "
            "with both to chat"
        )
    ids = written(
        lambda: tokenizer.encode_with_images(
            text, [each.counted for each in videos], add_special_tokens=special
        )
    )
    return ReadPrompt(text, ids, salt, images)


def listed(prompts: Any) -> list[Any]:
    return [prompts] if isinstance(prompts, str | Mapping) else list(prompts)


def _check_names(prompt: Mapping[str, Any]) -> None:
    for name, value in prompt.items():
        if name in UNSUPPORTED_PROMPT and value is not None:
            raise RequestError(f"{name}: {UNSUPPORTED_PROMPT[name]}")
        if name not in _NAMES and name not in UNSUPPORTED_PROMPT:
            raise _not_a_prompt(prompt)


def _not_a_prompt(prompt: Any) -> RequestError:
    return RequestError(
        "a prompt must be a text, {'prompt': text} or {'prompt_token_ids': [...]}, not "
        f"{prompt!r:.80}"
    )
