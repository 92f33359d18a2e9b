"""The tokenizer of the offline API: Headrace's, with the methods of transformers that scripts
call."""

from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

from headrace_common.images.layout import ImageFormat
from headrace_common.text.chat_template import ChatTemplate, encode_chat, find_chat_template
from headrace_common.text.checkpoint import CheckpointFiles
from headrace_common.text.tokenizer import Tokenizer

from ..core.errors import ConfigError

# The number of frames of each video, and how many of them are a second.
Videos = Sequence[tuple[int, float]]


class ChatTokenizer(Tokenizer):
    """A tokenizer with its checkpoint's chat template.

    `decode` leaves special tokens out unless `skip_special_tokens` is False; transformers keeps
    them by default. `images` says how the model reads images, for prompts that have some.
    """

    images: ImageFormat | None = None
    _files: CheckpointFiles | None = None

    @classmethod
    def from_files(cls, files: CheckpointFiles) -> "ChatTokenizer":
        tokenizer = super().from_files(files)
        assert isinstance(tokenizer, ChatTokenizer)
        tokenizer._files = files
        return tokenizer

    def chat_ids(
        self,
        messages: Sequence[Mapping[str, Any]],
        template: str | None = None,
        *,
        videos: Videos = (),
        **options: Any,
    ) -> list[int]:
        """Token ids of a conversation with `videos`; `options` are encode_chat's.

        Raises ConfigError if there is no template, ChatTemplateError if it refuses the messages,
        and PlaceholderMismatch if it shows another number of videos.
        """
        form = None if self.images is None else self.images.video
        return encode_chat(
            self,
            self._template(template),
            messages,
            show=None if form is None else form.show,
            rewrite=lambda text: self._rewritten(text, videos),
            **options,
        )

    def encode_with_images(
        self, text: str, videos: Videos = (), *, add_special_tokens: bool
    ) -> list[int]:
        """Token ids of a text that has a place for each of its images and videos. Raises
        PlaceholderMismatch."""
        return self.encode(self._rewritten(text, videos), add_special_tokens=add_special_tokens)

    def apply_chat_template(
        self,
        conversation: Sequence[Mapping[str, Any]],
        tools: Sequence[Mapping[str, Any]] | None = None,
        *,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        **variables: Any,
    ) -> str | list[int]:
        """The prompt of a conversation, as in transformers: token ids, or its text.

        `variables` are the template's own. Raises the errors of `chat_ids`.
        """
        options: dict[str, Any] = {
            "tools": tools,
            "add_generation_prompt": add_generation_prompt,
            "continue_final_message": continue_final_message,
            "variables": variables,
        }
        if tokenize:
            return self.chat_ids(conversation, chat_template, **options)
        return self._template(chat_template).render(conversation, **options)

    def __call__(self, text: str, *, add_special_tokens: bool = True) -> dict[str, list[int]]:
        """`{"input_ids": [...]}` of one text."""
        return {"input_ids": self.encode(text, add_special_tokens=add_special_tokens)}

    @property
    def eos_token_id(self) -> int | None:
        return self.token_to_id(self.special_tokens.get("eos_token", ""))

    @property
    def all_special_tokens(self) -> list[str]:
        return list(dict.fromkeys(self.special_tokens.values()))

    def convert_ids_to_tokens(self, ids: Sequence[int]) -> list[str | None]:
        return [self.id_to_token(each) for each in ids]

    def convert_tokens_to_ids(self, token: str) -> int | None:
        return self.token_to_id(token)

    @property
    def has_one_placeholder(self) -> bool:
        """Whether images and groups of frames have the same one."""
        form = self.images
        return form is not None and form.placeholders == {form.placeholder}

    def _rewritten(self, text: str, videos: Videos) -> str:
        if self.images is None:
            return text
        text = self.images.rewrite(text)
        form = self.images.video
        return form.write(text, videos) if videos and form is not None else text

    def _template(self, source: str | None) -> ChatTemplate:
        if source is not None:
            return ChatTemplate(source, self.special_tokens)
        if self._own_template is None:
            origin = "this tokenizer" if self._files is None else self._files.origin
            raise ConfigError(f"{origin} has no chat template: pass chat_template")
        return self._own_template

    @cached_property
    def _own_template(self) -> ChatTemplate | None:
        return None if self._files is None else find_chat_template(self._files, self)
