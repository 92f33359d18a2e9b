"""An answer that also shows its prompts (echoed, or their log probabilities), or token counts.

Wraps another answer and gives it pieces that begin with the prompt, so that the same code makes
text, tokens, log probabilities and offsets of both.
"""

from collections.abc import Iterator, Sequence
from dataclasses import replace
from typing import Any

from headrace_common.wire.messages import Logprobs

from ..errors import ApiError
from ..queue_client.run import Piece, Usage
from .answers import Answer, AnswerOptions, Chunk
from .logprobs import UNKNOWN, prompt_logprobs
from .prompt_echo_options import PromptEchoOptions


def with_prompt_echo(answer: Answer, options: AnswerOptions) -> Answer:
    """Wraps an answer that shows its prompts; returns any other one unchanged."""
    return (
        answer
        if options.prompt_echo is None
        else PromptEchoAnswer(answer, options, options.prompt_echo)
    )


class PromptEchoAnswer:
    def __init__(self, answer: Answer, options: AnswerOptions, echo: PromptEchoOptions) -> None:
        self._answer, self._options, self._echo = answer, options, echo
        self.named, self.numbered, self.done = answer.named, answer.numbered, answer.done
        self._begun: set[int] = set()
        self._found: dict[int, Sequence[Logprobs]] = {}
        self._prompt_tokens = sum(map(len, options.prompts))
        self._made = 0

    def chunks(self, piece: Piece) -> Iterator[Chunk]:
        if not self._echo.only:
            self._made += len(piece.token_ids)
        chunks = self._answer.chunks(self._shown(piece))
        return map(self._with_counts, chunks) if self._echo.counts else chunks

    def closing(self, usage: Usage) -> Iterator[Chunk]:
        return self._answer.closing(self._counted(usage))

    def failure(self, error: ApiError) -> Chunk:
        return self._answer.failure(error)

    def add(self, piece: Piece) -> None:
        self._answer.add(self._shown(piece))

    def whole(self, usage: Usage) -> Chunk:
        body = self._answer.whole(self._counted(usage))
        if self._echo.logprobs is not None:
            self._add_logprobs(body)
        return body

    def _with_counts(self, chunk: Chunk) -> Chunk:
        usage = Usage(prompt_tokens=self._prompt_tokens, completion_tokens=self._made)
        return {**chunk, "usage": usage.counts}

    def _counted(self, usage: Usage) -> Usage:
        return replace(usage, completion_tokens=0) if self._echo.only else usage

    def _shown(self, piece: Piece) -> Piece:
        number = piece.choice // self._options.choices_per_prompt
        if piece.prompt_logprobs is not None:
            self._found[number] = piece.prompt_logprobs
        if self._echo.only:
            none = None if piece.logprobs is None else ()
            piece = replace(piece, text="", token_ids=(), logprobs=none, stop_reason=None)
            if piece.finish_reason is not None:
                piece = replace(piece, finish_reason="length")
        if not self._echo.echo or piece.choice in self._begun:
            return piece
        self._begun.add(piece.choice)
        return self._echoed(piece, number)

    def _echoed(self, piece: Piece, number: int) -> Piece:
        prompt = self._options.prompts[number]
        text = self._options.tokenizer.decode(prompt, skip_special_tokens=True)
        logprobs = None
        if piece.logprobs is not None:
            found = self._found.get(number, [UNKNOWN] * (len(prompt) - 1))
            logprobs = [UNKNOWN, *found, *piece.logprobs]
        return replace(
            piece,
            text=text + piece.text,
            token_ids=[*prompt, *piece.token_ids],
            logprobs=logprobs,
        )

    def _add_logprobs(self, body: dict[str, Any]) -> None:
        """Adds log probabilities as vLLM does: a chat has one prompt, completions one for each
        choice."""
        if body["object"] == "chat.completion":
            body["prompt_logprobs"] = self._of_prompt(0)
            return
        for index, choice in enumerate(body["choices"]):
            number = index // self._options.choices_per_prompt
            choice["prompt_logprobs"] = self._of_prompt(number)

    def _of_prompt(self, number: int) -> list[Any] | None:
        found = self._found.get(number)
        if found is None:
            return None
        prompt = self._options.prompts[number]
        return prompt_logprobs(self._options.tokenizer, prompt, found, self._echo.logprobs or 0)
