"""Bodies of OpenAI's answers, whole and in chunks, as plain dicts."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

from headrace_common.text.tokenizer import Tokenizer

from ..errors import ApiError
from ..parsing.output import PLAIN, OutputForm
from ..queue_client.run import Piece, Usage
from ..streaming.sse import DONE, TextEvent
from .logprobs import chat_logprobs, completion_logprobs
from .prompt_echo_options import PromptEchoOptions

Chunk = dict[str, Any]


@dataclass(frozen=True, slots=True, kw_only=True)
class AnswerOptions:
    """The optional parts of an answer that the request asked for. `logprobs` is the number of
    alternatives; None: no logprobs.

    `prompts` are the token ids of all prompts, which `shows_ids` shows with those of the output.
    """

    answer_id: str
    model: str
    created: int
    tokenizer: Tokenizer
    choices: int
    logprobs: int | None = None
    include_usage: bool = False
    shows_ids: bool = False
    prompts: Sequence[Sequence[int]] = ((),)
    choices_per_prompt: int = 1
    form: OutputForm = PLAIN
    system_fingerprint: str | None = None
    prompt_echo: PromptEchoOptions | None = None

    @property
    def prompt(self) -> Sequence[int]:
        """The first prompt."""
        return self.prompts[0]


class Answer(Protocol):
    """One answer while it is made. It is read in chunks, or collected and read once at the end.

    `named`: its stream's events have names. `numbered`: all its events are numbered in one
    sequence. `done` ends the stream.
    """

    named: bool
    numbered: bool
    done: bytes

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        """Returns the events for this piece, if there is something to show yet."""

    def closing(self, usage: Usage) -> Iterator[Chunk]:
        """Returns the events after the last piece."""

    def failure(self, error: ApiError) -> Chunk:
        """Returns the event that ends a stream with an error."""

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


class OpenAIAnswer:
    """The fields that the answers of chats and of completions share. `kind` is the object's
    type."""

    named = False
    numbered = False
    done = DONE

    def __init__(self, options: AnswerOptions, id_prefix: str, kind: str) -> None:
        self._options = options
        self._choices = [_Choice() for _ in range(options.choices)]
        self._head = {
            "id": f"{id_prefix}{options.answer_id}",
            "object": kind,
            "created": options.created,
            "model": options.model,
            "system_fingerprint": options.system_fingerprint,
        }

    def text_event(self, choice: int) -> TextEvent | None:
        """Returns a maker of events for pieces that have only text and tokens.

        None if `chunks` must make the events.
        """
        return None

    def closing(self, usage: Usage) -> Iterator[Chunk]:
        if self._options.include_usage:
            yield {**self._head, "choices": [], "usage": usage.body}

    def failure(self, error: ApiError) -> Chunk:
        return error.body

    def _with_usage(self, chunk: Chunk) -> Chunk:
        return {**chunk, "usage": None} if self._options.include_usage else chunk


class ChatAnswer(OpenAIAnswer):
    def __init__(self, options: AnswerOptions) -> None:
        super().__init__(options, "chatcmpl-", "chat.completion.chunk")

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        choice = self._choices[piece.choice]
        if not choice.opened:
            choice.opened = True
            yield self._opening(piece.choice)
        logprobs = self._logprobs(piece)
        if piece.text or logprobs is not None or (self._options.shows_ids and piece.token_ids):
            yield self._chunk(piece, {"content": piece.text}, logprobs)
        if piece.finish_reason is not None:
            yield self._finish(piece, piece.finish_reason)

    def text_event(self, choice: int) -> TextEvent | None:
        options = self._options
        if not self._choices[choice].opened or options.logprobs is not None or options.shows_ids:
            return None
        return TextEvent(
            lambda text: self._chunk(_only_text(choice, text), {"content": text}, None)
        )

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
        if self._options.shows_ids:
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
        if self._options.shows_ids:
            body["token_ids"] = choice.token_ids
        return body

    def _logprobs(self, piece: Piece) -> Chunk | None:
        options = self._options
        if options.logprobs is None or piece.logprobs is None or not piece.token_ids:
            return None
        return chat_logprobs(options.tokenizer, piece.token_ids, piece.logprobs, options.logprobs)

    def _with_prompt(self, body: Chunk) -> Chunk:
        if not self._options.shows_ids:
            return body
        return {**body, "prompt_token_ids": list(self._options.prompt)}


class CompletionAnswer(OpenAIAnswer):
    def __init__(self, options: AnswerOptions) -> None:
        super().__init__(options, "cmpl-", "text_completion")

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        choice = self._choices[piece.choice]
        logprobs = self._logprobs(piece, choice)
        shows_ids = self._options.shows_ids and piece.token_ids
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
        if self._options.logprobs is not None or self._options.shows_ids:
            return None
        return TextEvent(lambda text: next(self.chunks(_only_text(choice, text))))

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
        if not self._options.shows_ids:
            return
        body["token_ids"] = ids
        if with_prompt:
            prompt = self._options.prompts[index // self._options.choices_per_prompt]
            body["prompt_token_ids"] = list(prompt)

    def _logprobs(self, piece: Piece, choice: _Choice) -> Chunk | None:
        options = self._options
        if options.logprobs is None or piece.logprobs is None or not piece.token_ids:
            return None
        lists, choice.offset = completion_logprobs(
            options.tokenizer, piece.token_ids, piece.logprobs, options.logprobs, choice.offset
        )
        return lists
