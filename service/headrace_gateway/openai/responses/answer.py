"""The answer of /v1/responses: typed events, or the response object with their whole content."""

import hashlib
from collections.abc import Iterator, Mapping
from typing import Any

from headrace_common.errors import FailureCode

from ...errors import ApiError
from ...parsing.output import OutputParser, call_id
from ...parsing.parts import CallArguments, CallStart, Part, Reasoning, Text
from ...queue_client.run import Piece, Usage
from ..answers import AnswerOptions, Chunk
from ..logprobs import chat_logprobs
from ..opaque_reasoning import seal

ID_PREFIX = "resp_"

# For each kind of item, the name of its content's events and the kind of its part.
_EVENTS = {"message": "response.output_text", "reasoning": "response.reasoning_text"}
_PARTS = {"message": "output_text", "reasoning": "reasoning_text"}
_ID_PREFIXES = {"message": "msg_", "reasoning": "rs_", "function_call": "fc_"}


def response_object(
    echo: Mapping[str, Any], answer_id: str, created: int, model: str, **now: Any
) -> dict[str, Any]:
    """Returns a response object. `echo` has fields of the request, `now` the present state."""
    return {
        "id": f"{ID_PREFIX}{answer_id}",
        "object": "response",
        "created_at": created,
        "model": model,
        "status": "in_progress",
        "error": None,
        "incomplete_details": None,
        "output": [],
        "usage": None,
        **echo.get("response", {}),
        **now,
    }


def failed_object(response: Mapping[str, Any], error: ApiError) -> dict[str, Any]:
    """Returns a response that has ended without a whole answer."""
    if error.code == FailureCode.CANCELLED:
        return {**response, "status": "cancelled"}
    cause = {"code": "server_error", "message": error.message}
    return {**response, "status": "failed", "error": cause}


class ResponsesAnswer:
    named = True
    numbered = True
    done = b""

    def __init__(self, options: AnswerOptions) -> None:
        self._options = options
        self._parser = OutputParser(options.form, options.tokenizer, options.prompt)
        self._opened = False
        self._sequence = 0
        self._items: list[dict[str, Any]] = []
        self._open: dict[str, Any] | None = None  # the open item
        self._texts: list[str] = []
        self._logprobs: list[Chunk] = []  # the text of the open item
        self._unsent: list[Chunk] = []
        self._reason: str | None = None
        self._seals = bool(options.form.echo.get("seals_reasoning"))

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        if not self._opened:
            self._opened = True
            for kind in ("response.created", "response.in_progress"):
                yield self._event(kind, response=self._response())
        parts = self._parser.push(piece.text, piece.token_ids)
        if piece.finish_reason is not None:
            self._reason = piece.finish_reason
            parts += self._parser.finish()
        self._take_logprobs(piece, parts)
        for part in parts:
            yield from self._part(part)
        if piece.finish_reason is not None:
            yield from self._close("incomplete" if self._reason == "length" else "completed")

    def closing(self, usage: Usage) -> Iterator[Chunk]:
        response = self.whole(usage)
        yield self._event(f"response.{response['status']}", response=response)

    def failure(self, error: ApiError) -> Chunk:
        return self._event("response.failed", response=failed_object(self._response(), error))

    def add(self, piece: Piece) -> None:
        for _ in self.chunks(piece):
            pass

    def whole(self, usage: Usage) -> Chunk:
        cut = self._reason == "length"
        return self._response(
            status="incomplete" if cut else "completed",
            incomplete_details={"reason": "max_output_tokens"} if cut else None,
            output=self._items,
            usage=self._usage(usage),
        )

    def _response(self, **now: Any) -> dict[str, Any]:
        options = self._options
        return response_object(
            options.form.echo, options.answer_id, options.created, options.model, **now
        )

    def _usage(self, usage: Usage) -> Chunk:
        return {
            "input_tokens": usage.prompt_tokens,
            "input_tokens_details": {
                "cached_tokens": usage.cached_tokens,
                "cache_write_tokens": 0,
            },
            "output_tokens": usage.completion_tokens,
            "output_tokens_details": {"reasoning_tokens": self._parser.reasoning_tokens},
            "total_tokens": usage.prompt_tokens + usage.completion_tokens,
        }

    def _event(self, kind: str, **fields: Any) -> Chunk:
        event = {"type": kind, "sequence_number": self._sequence, **fields}
        self._sequence += 1
        return event

    # Items

    def _part(self, part: Part) -> Iterator[Chunk]:
        match part:
            case Text():
                yield from self._more_text("message", part.text)
            case Reasoning():
                yield from self._more_text("reasoning", part.text)
            case CallStart():
                yield from self._begin_call(part)
            case CallArguments():
                self._texts.append(part.text)
                yield self._of_item("response.function_call_arguments.delta", delta=part.text)

    def _more_text(self, kind: str, text: str) -> Iterator[Chunk]:
        if self._open is None or self._open["type"] != kind:
            yield from self._begin_text(kind)
        self._texts.append(text)
        logprobs = {}
        if kind == "message":
            logprobs = {"logprobs": self._unsent}
            self._logprobs += self._unsent
            self._unsent = []
        yield self._of_part(f"{_EVENTS[kind]}.delta", delta=text, **logprobs)

    def _begin_text(self, kind: str) -> Iterator[Chunk]:
        shape: Chunk = {"role": "assistant"} if kind == "message" else {"summary": []}
        yield from self._begin({**shape, "content": []}, kind)
        yield self._of_part("response.content_part.added", part=self._content(kind, "", []))

    def _begin_call(self, part: CallStart) -> Iterator[Chunk]:
        options = self._options
        name = call_id(options.form, options.answer_id, 0, part.index, "call_")
        shape = {"call_id": name, "name": part.name, "arguments": ""}
        yield from self._begin(shape, "function_call")

    def _begin(self, shape: Mapping[str, Any], kind: str) -> Iterator[Chunk]:
        yield from self._close("completed")
        item_id = _item_id(kind, self._options.answer_id, len(self._items))
        self._open = {"id": item_id, "type": kind, "status": "in_progress", **shape}
        yield self._event(
            "response.output_item.added", output_index=len(self._items), item=dict(self._open)
        )

    def _close(self, status: str) -> Iterator[Chunk]:
        if self._open is None:
            return
        item, text = {**self._open, "status": status}, "".join(self._texts)
        kind = item["type"]
        if kind == "function_call":
            item["arguments"] = text
            yield self._of_item(
                "response.function_call_arguments.done", name=item["name"], arguments=text
            )
        else:
            logprobs = self._logprobs + self._unsent
            content = self._content(kind, text, logprobs)
            item["content"] = [content]
            if kind == "reasoning" and self._seals:
                item["encrypted_content"] = seal(text)
            more = {"logprobs": logprobs} if kind == "message" else {}
            yield self._of_part(f"{_EVENTS[kind]}.done", text=text, **more)
            yield self._of_part("response.content_part.done", part=content)
        index = len(self._items)
        self._items.append(item)
        if kind == "message":
            self._logprobs, self._unsent = [], []
        self._open, self._texts = None, []
        yield self._event("response.output_item.done", output_index=index, item=item)

    def _content(self, kind: str, text: str, logprobs: list[Chunk]) -> Chunk:
        more = {"annotations": [], "logprobs": logprobs} if kind == "message" else {}
        return {"type": _PARTS[kind], "text": text, **more}

    def _of_item(self, kind: str, **fields: Any) -> Chunk:
        assert self._open is not None
        place = {"item_id": self._open["id"], "output_index": len(self._items)}
        return self._event(kind, **place, **fields)

    def _of_part(self, kind: str, **fields: Any) -> Chunk:
        return self._of_item(kind, content_index=0, **fields)

    def _take_logprobs(self, piece: Piece, parts: list[Part]) -> None:
        """Collects the log probabilities of tokens that may belong to a message's text."""
        options = self._options
        if options.logprobs is None or piece.logprobs is None or not piece.token_ids:
            return
        says = self._open is not None and self._open["type"] == "message"
        if any(not isinstance(part, Text) for part in parts) or not (parts or says):
            return
        self._unsent += chat_logprobs(
            options.tokenizer, piece.token_ids, piece.logprobs, options.logprobs
        )["content"]


def _item_id(kind: str, answer_id: str, index: int) -> str:
    digest = hashlib.sha256(f"{answer_id}:item:{index}".encode()).hexdigest()
    return f"{_ID_PREFIXES[kind]}{digest[:32]}"
