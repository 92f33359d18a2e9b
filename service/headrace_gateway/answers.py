"""Bodies of answers as OpenAI has them, whole and in chunks, as plain dicts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace_common.tokenizer import Tokenizer

from .errors import ApiError
from .logprobs import chat_logprobs, completion_logprobs
from .output import PLAIN, OutputForm
from .prompt_view import PromptView
from .run import Piece, Usage
from .sse import DONE, TextEvent

Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """What the request asked to see. `logprobs` None: none; else how many alternatives.

    `prompts` are shown in the answer, `prompt` is the first one whether it is shown or not.
    """

    answer_id: str
    model: str
    created: int
    tokenizer: Tokenizer
    choices: int
    logprobs: int | None = None
    include_usage: bool = False
    prompts: tuple[tuple[int, ...], ...] | None = None
    choices_per_prompt: int = 1
    prompt: Sequence[int] = ()
    form: OutputForm = PLAIN
    system_fingerprint: str | None = None
    view: PromptView | None = None


class Answer(Protocol):
    """One answer in the making: either read in chunks, or added up and read once at the end.

    `named`: its stream's events have names. `numbered`: they count as one row, also the last ones.
    `done` is the stream's very end.
    """

    named: bool
    numbered: bool
    done: bytes

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        """What a stream sends for this piece; nothing where there is nothing to see yet."""

    def closing(self, usage: Usage) -> Iterator[Chunk]:
        """What a stream sends behind the last piece."""

    def failure(self, error: ApiError) -> Chunk:
        """What ends a stream that cannot go on."""

    def add(self, piece: Piece) -> None: ...

    def whole(self, usage: Usage) -> Chunk: ...


@dataclass(slots=True)
class _Choice:
    texts: list[str] = field(default_factory=list)
    token_ids: list[int] = field(default_factory=list)
    logprobs: dict[str, list[Any]] | None = None
    finish_reason: str | None = None
    stop_reason: str | int | None = None
    opened: bool = False
    offset: int = 0

    def add(self, piece: Piece, logprobs: dict[str, list[Any]] | None) -> None:
        self.texts.append(piece.text)
        self.token_ids.extend(piece.token_ids)
        self.finish_reason = piece.finish_reason
        self.stop_reason = piece.stop_reason
        if logprobs is not None:
            self.logprobs = _joined(self.logprobs, logprobs)


def _joined(before: dict[str, list[Any]] | None, new: dict[str, list[Any]]) -> dict[str, list[Any]]:
    if before is None:
        return new
    for name, values in new.items():
        before[name].extend(values)
    return before


def _only_text(choice: int, text: str) -> Piece:
    return Piece(choice=choice, text=text, token_ids=(), logprobs=None)


class OpenAIStream:
    """How streams of chats and completions are written."""

    named = False
    numbered = False
    done = DONE
    _options: AnswerOptions

    def text_event(self, choice: int) -> TextEvent | None:
        """What a stream sends from now on for a piece that is a text, its tokens and nothing else;
        None where `chunks` must say it."""
        return None

    def failure(self, error: ApiError) -> Chunk:
        return error.body

    def _with_usage(self, chunk: Chunk) -> Chunk:
        return {**chunk, "usage": None} if self._options.include_usage else chunk


class ChatAnswer(OpenAIStream):
    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._choices = [_Choice() for _ in range(options.choices)]
        self._head = {
            "id": f"chatcmpl-{options.answer_id}",
            "object": "chat.completion.chunk",
            "created": options.created,
            "model": options.model,
            "system_fingerprint": options.system_fingerprint,
        }

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        choice = self._choices[piece.choice]
        if not choice.opened:
            choice.opened = True
            yield self._opening(piece.choice)
        logprobs = self._logprobs(piece)
        if piece.text or logprobs is not None or (self._shows_ids and piece.token_ids):
            yield self._chunk(piece, {"content": piece.text}, logprobs)
        if piece.finish_reason is not None:
            yield self._finish(piece, piece.finish_reason)

    def text_event(self, choice: int) -> TextEvent | None:
        if not self._choices[choice].opened or self._options.logprobs is not None:
            return None
        if self._shows_ids:
            return None
        return TextEvent(
            lambda text: self._chunk(_only_text(choice, text), {"content": text}, None)
        )

    def closing(self, usage: Usage) -> Iterator[Chunk]:
        if self._options.include_usage:
            yield {**self._head, "choices": [], "usage": usage.body}

    def add(self, piece: Piece) -> None:
        self._choices[piece.choice].add(piece, self._logprobs(piece))

    def whole(self, usage: Usage) -> Chunk:
        body = {
            **self._head,
            "object": "chat.completion",
            "choices": [self._whole_choice(i, c) for i, c in enumerate(self._choices)],
            "usage": usage.body,
        }
        return self._with_prompt(body)

    @property
    def _shows_ids(self) -> bool:
        return self._options.prompts is not None

    def _opening(self, index: int) -> Chunk:
        delta = {"role": "assistant", "content": ""}
        choice = {"index": index, "delta": delta, "logprobs": None, "finish_reason": None}
        chunk = self._with_usage({**self._head, "choices": [choice]})
        return self._with_prompt(chunk)

    def _chunk(self, piece: Piece, delta: Chunk, logprobs: Chunk | None) -> Chunk:
        choice: Chunk = {
            "index": piece.choice,
            "delta": delta,
            "logprobs": logprobs,
            "finish_reason": None,
        }
        if self._shows_ids:
            choice["token_ids"] = list(piece.token_ids)
        return self._with_usage({**self._head, "choices": [choice]})

    def _finish(self, piece: Piece, reason: str | None) -> Chunk:
        choice = {
            "index": piece.choice,
            "delta": {},
            "logprobs": None,
            "finish_reason": reason,
            "stop_reason": piece.stop_reason,
        }
        return self._with_usage({**self._head, "choices": [choice]})

    def _whole_choice(self, index: int, choice: _Choice) -> Chunk:
        body: Chunk = {
            "index": index,
            "message": {"role": "assistant", "content": "".join(choice.texts), "refusal": None},
            "logprobs": choice.logprobs,
            "finish_reason": choice.finish_reason,
            "stop_reason": choice.stop_reason,
        }
        if self._shows_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _logprobs(self, piece: Piece) -> Chunk | None:
        options = self._options
        if options.logprobs is None or piece.logprobs is None or not piece.token_ids:
            return None
        return chat_logprobs(options.tokenizer, piece.token_ids, piece.logprobs, options.logprobs)

    def _with_prompt(self, body: Chunk) -> Chunk:
        if self._options.prompts is None:
            return body
        return {**body, "prompt_token_ids": list(self._options.prompts[0])}


class CompletionAnswer(OpenAIStream):
    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._choices = [_Choice() for _ in range(options.choices)]
        self._head = {
            "id": f"cmpl-{options.answer_id}",
            "object": "text_completion",
            "created": options.created,
            "model": options.model,
            "system_fingerprint": options.system_fingerprint,
        }

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        choice = self._choices[piece.choice]
        logprobs = self._logprobs(piece, choice)
        shows_ids = self._options.prompts is not None and piece.token_ids
        if not (piece.text or piece.finish_reason or logprobs is not None or shows_ids):
            return
        body = self._choice(piece.choice, piece.text, logprobs, piece.finish_reason)
        if piece.finish_reason is not None:
            body["stop_reason"] = piece.stop_reason
        self._add_ids(body, piece.choice, list(piece.token_ids), with_prompt=not choice.opened)
        choice.opened = True
        chunk = {**self._head, "choices": [body]}
        yield self._with_usage(chunk)

    def text_event(self, choice: int) -> TextEvent | None:
        if self._options.logprobs is not None or self._options.prompts is not None:
            return None
        return TextEvent(lambda text: next(self.chunks(_only_text(choice, text))))

    def closing(self, usage: Usage) -> Iterator[Chunk]:
        if self._options.include_usage:
            yield {**self._head, "choices": [], "usage": usage.body}

    def add(self, piece: Piece) -> None:
        choice = self._choices[piece.choice]
        choice.add(piece, self._logprobs(piece, choice))

    def whole(self, usage: Usage) -> Chunk:
        choices = []
        for index, choice in enumerate(self._choices):
            text = "".join(choice.texts)
            body = self._choice(index, text, choice.logprobs, choice.finish_reason)
            body["stop_reason"] = choice.stop_reason
            self._add_ids(body, index, choice.token_ids, with_prompt=True)
            choices.append(body)
        return {**self._head, "choices": choices, "usage": usage.body}

    def _choice(
        self, index: int, text: str, logprobs: Chunk | None, finish_reason: str | None
    ) -> Chunk:
        return {
            "index": index,
            "text": text,
            "logprobs": logprobs,
            "finish_reason": finish_reason,
        }

    def _add_ids(self, body: Chunk, index: int, ids: list[int], *, with_prompt: bool) -> None:
        prompts = self._options.prompts
        if prompts is None:
            return
        body["token_ids"] = ids
        if with_prompt:
            body["prompt_token_ids"] = list(prompts[index // self._options.choices_per_prompt])

    def _logprobs(self, piece: Piece, choice: _Choice) -> Chunk | None:
        options = self._options
        if options.logprobs is None or piece.logprobs is None or not piece.token_ids:
            return None
        lists, choice.offset = completion_logprobs(
            options.tokenizer, piece.token_ids, piece.logprobs, options.logprobs, choice.offset
        )
        return lists
