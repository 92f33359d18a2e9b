"""The answer to a chat whose text may hold reasoning and calls of tools."""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..parsing.output import OutputParser, call_id
from ..parsing.parts import CallArguments, CallStart, Part, Reasoning, Text
from ..queue_client.run import Piece, Usage
from ..streaming.sse import TextEvent
from .answers import Answer, AnswerOptions, ChatAnswer, Chunk


def chat_answer(options: AnswerOptions) -> Answer:
    """Returns the answer to a chat; it has parsers only if it needs them."""
    return ParsedChatAnswer(options) if options.form.parsed else ChatAnswer(options)


@dataclass(slots=True)
class _Parsed:
    """The parts of one choice so far, and the parser that makes more."""

    parser: OutputParser
    text: list[str] = field(default_factory=list)
    reasoning: list[str] = field(default_factory=list)
    calls: list[tuple[str, list[str]]] = field(default_factory=list)

    def read(self, piece: Piece) -> list[Part]:
        parts = self.parser.push(piece.text, piece.token_ids)
        return parts if piece.finish_reason is None else parts + self.parser.finish()

    def add(self, parts: Sequence[Part]) -> None:
        for part in parts:
            match part:
                case Text():
                    self.text.append(part.text)
                case Reasoning():
                    self.reasoning.append(part.text)
                case CallStart():
                    self.calls.append((part.name, []))
                case CallArguments():
                    self.calls[-1][1].append(part.text)

    def finish_reason(self, reason: str | None) -> str | None:
        return "tool_calls" if reason == "stop" and self.parser.calls else reason


class ParsedChatAnswer(ChatAnswer):
    def __init__(self, options: AnswerOptions) -> None:
        super().__init__(options)
        self._parsed = [
            _Parsed(OutputParser(options.form, options.tokenizer, options.prompt))
            for _ in range(options.choices)
        ]

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        choice, parsed = self._choices[piece.choice], self._parsed[piece.choice]
        if not choice.opened:
            choice.opened = True
            yield self._opening(piece.choice)
        logprobs = self._logprobs(piece)
        deltas = [self._delta(piece.choice, part) for part in parsed.read(piece)]
        if not deltas and (logprobs is not None or (self._options.shows_ids and piece.token_ids)):
            deltas = [{}]
        for number, delta in enumerate(deltas):
            chunk = self._chunk(piece, delta, None if number else logprobs)
            if number:
                chunk["choices"][0].pop("token_ids", None)
            yield chunk
        if piece.finish_reason is not None:
            yield self._finish(piece, parsed.finish_reason(piece.finish_reason))

    def text_event(self, choice: int) -> TextEvent | None:
        return None

    def closing(self, usage: Usage) -> Iterator[Chunk]:
        for chunk in super().closing(usage):
            yield {**chunk, "usage": self._usage(usage)}

    def add(self, piece: Piece) -> None:
        super().add(piece)
        parsed = self._parsed[piece.choice]
        parsed.add(parsed.read(piece))

    def whole(self, usage: Usage) -> Chunk:
        body = super().whole(usage)
        for choice, parsed in zip(body["choices"], self._parsed, strict=True):
            choice["message"] = self._message(choice["index"], parsed)
            choice["finish_reason"] = parsed.finish_reason(choice["finish_reason"])
        return {**body, "usage": self._usage(usage)}

    def _usage(self, usage: Usage) -> Chunk:
        if self._options.form.reasoning is None:
            return usage.body
        thought = sum(parsed.parser.reasoning_tokens for parsed in self._parsed)
        return {**usage.body, "completion_tokens_details": {"reasoning_tokens": thought}}

    def _message(self, choice: int, parsed: _Parsed) -> Chunk:
        text = "".join(parsed.text)
        message: Chunk = {
            "role": "assistant",
            "content": text or (None if parsed.calls or parsed.reasoning else ""),
            "refusal": None,
        }
        if parsed.reasoning:
            message["reasoning_content"] = message["reasoning"] = "".join(parsed.reasoning)
        if parsed.calls:
            message["tool_calls"] = [
                self._call(choice, index, name, "".join(arguments))
                for index, (name, arguments) in enumerate(parsed.calls)
            ]
        return message

    def _delta(self, choice: int, part: Part) -> Chunk:
        match part:
            case Text():
                return {"content": part.text}
            case Reasoning():
                return {"reasoning_content": part.text, "reasoning": part.text}
            case CallStart():
                call = {"index": part.index, **self._call(choice, part.index, part.name, "")}
                return {"tool_calls": [call]}
            case CallArguments():
                return {"tool_calls": [{"index": part.index, "function": {"arguments": part.text}}]}

    def _call(self, choice: int, index: int, name: str, arguments: str) -> dict[str, Any]:
        options = self._options
        return {
            "id": call_id(options.form, options.answer_id, choice, index, "call_"),
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        }
