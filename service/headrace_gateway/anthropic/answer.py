"""The answer of /v1/messages: Anthropic's events, and the message that they add up to."""

import json
from collections.abc import Iterator
from typing import Any

from ..errors import ApiError
from ..openai.answers import AnswerOptions, Chunk
from ..openai.opaque_reasoning import seal
from ..parsing.output import OutputParser, call_id
from ..parsing.parts import CallArguments, CallStart, Part, Reasoning, Text
from ..queue_client.run import Piece, Usage
from .errors import anthropic_error

OMITS_THINKING = "omits_thinking"
_DELTAS = {"text": "text_delta", "thinking": "thinking_delta"}


class MessagesAnswer:
    named = True
    numbered = False
    done = b""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._parser = OutputParser(options.form, options.tokenizer, options.prompt)
        self._opened = False
        self._blocks: list[dict[str, Any]] = []  # the last block may still be open
        self._open = False
        self._texts: list[str] = []
        self._last: Piece | None = None
        self._omits = bool(options.form.echo.get(OMITS_THINKING))

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        if not self._opened:
            self._opened = True
            usage = Usage(prompt_tokens=len(self._options.prompt))
            yield {"type": "message_start", "message": self._message([], usage)}
        parts = self._parser.push(piece.text, piece.token_ids)
        if piece.finish_reason is not None:
            self._last = piece
            parts += self._parser.finish()
        for part in parts:
            yield from self._part(part)
        if piece.finish_reason is not None:
            yield from self._close()

    def closing(self, usage: Usage) -> Iterator[Chunk]:
        yield {"type": "message_delta", "delta": self._ending, "usage": _usage(usage)}
        yield {"type": "message_stop"}

    def failure(self, error: ApiError) -> Chunk:
        return anthropic_error(error)

    def add(self, piece: Piece) -> None:
        for _ in self.chunks(piece):
            pass

    def whole(self, usage: Usage) -> Chunk:
        return {**self._message(self._blocks, usage), **self._ending}

    def _message(self, content: list[dict[str, Any]], usage: Usage) -> Chunk:
        return {
            "id": f"msg_{self._options.answer_id}",
            "type": "message",
            "role": "assistant",
            "model": self._options.model,
            "content": content,
            "stop_reason": None,
            "stop_sequence": None,
            "usage": _usage(usage),
        }

    @property
    def _ending(self) -> Chunk:
        last = self._last
        if last is None or last.finish_reason == "length":
            return {"stop_reason": "max_tokens", "stop_sequence": None}
        if self._parser.calls:
            return {"stop_reason": "tool_use", "stop_sequence": None}
        if isinstance(last.stop_reason, str):
            return {"stop_reason": "stop_sequence", "stop_sequence": last.stop_reason}
        return {"stop_reason": "end_turn", "stop_sequence": None}

    # Blocks

    def _part(self, part: Part) -> Iterator[Chunk]:
        match part:
            case Text():
                yield from self._more_text("text", part.text)
            case Reasoning():
                yield from self._more_text("thinking", part.text)
            case CallStart():
                yield from self._begin({"type": "tool_use", **self._call(part), "input": {}})
            case CallArguments():
                self._texts.append(part.text)
                yield self._delta({"type": "input_json_delta", "partial_json": part.text})

    def _call(self, part: CallStart) -> Chunk:
        options = self._options
        name = call_id(options.form, options.answer_id, 0, part.index, "toolu_")
        return {"id": name, "name": part.name}

    def _more_text(self, kind: str, text: str) -> Iterator[Chunk]:
        if not self._open or self._blocks[-1]["type"] != kind:
            more = {"signature": ""} if kind == "thinking" else {}
            yield from self._begin({"type": kind, kind: "", **more})
        self._texts.append(text)
        if kind == "text" or not self._omits:
            yield self._delta({"type": _DELTAS[kind], kind: text})

    def _begin(self, block: dict[str, Any]) -> Iterator[Chunk]:
        yield from self._close()
        self._blocks.append(block)
        self._open = True
        index = len(self._blocks) - 1
        yield {"type": "content_block_start", "index": index, "content_block": dict(block)}

    def _close(self) -> Iterator[Chunk]:
        if not self._open:
            return
        block, text = self._blocks[-1], "".join(self._texts)
        kind = block["type"]
        if kind == "tool_use":
            block["input"] = _object(text)
        elif kind == "thinking" and self._omits:
            block["signature"] = seal(text)
        else:
            block[kind] = text
        if kind == "thinking":
            yield self._delta({"type": "signature_delta", "signature": block["signature"]})
        self._open, self._texts = False, []
        yield {"type": "content_block_stop", "index": len(self._blocks) - 1}

    def _delta(self, delta: Chunk) -> Chunk:
        return {"type": "content_block_delta", "index": len(self._blocks) - 1, "delta": delta}


def _usage(usage: Usage) -> Chunk:
    """Counts the prompt's cached tokens separately."""
    return {
        "input_tokens": usage.prompt_tokens - usage.cached_tokens,
        "cache_creation_input_tokens": 0,
        "cache_read_input_tokens": usage.cached_tokens,
        "output_tokens": usage.completion_tokens,
    }


def _object(text: str) -> dict[str, Any]:
    """Returns a call's input as an object; one that was cut off, or is not an object, becomes
    empty."""
    try:
        value = json.loads(text)
    except (ValueError, RecursionError):
        return {}
    return value if isinstance(value, dict) else {}
