"""A running prompt of the offline API: collects tokens, text and log probabilities."""

import time
from collections.abc import Iterable
from dataclasses import replace

from headrace_common.text.detokenizer import ChoiceText
from headrace_common.text.tokenizer import Tokenizer

from ..core.outputs import SequenceOutput, TokenLogprobs
from .outputs import CompletionOutput, Logprob, RequestMetrics, RequestOutput
from .sampling_params import RequestOutputKind, SamplingParams


class RunningRequest:
    """Builds the output of one request from the engine's steps.

    Without a tokenizer it has no text.
    """

    def __init__(
        self,
        output: RequestOutput,
        params: SamplingParams,
        tokenizer: Tokenizer | None,
        kind: RequestOutputKind,
    ) -> None:
        self.output = output
        self.metrics = output.metrics = RequestMetrics(time.time())
        self._kind = kind
        self._tokenizer = tokenizer
        self._texts = [
            None
            if tokenizer is None or not params.detokenize
            else ChoiceText(tokenizer, output.prompt_token_ids, params)
            for _ in output.outputs
        ]
        # Characters and tokens of each choice that `take` has returned as a delta.
        self._taken = [(0, 0)] * len(output.outputs)
        for choice in output.outputs:
            choice.lora_request = output.lora_request
            if params.logprobs is not None:
                choice.logprobs, choice.cumulative_logprob = [], 0.0

    def push(self, step: SequenceOutput) -> bool:
        """Adds a step's tokens; returns True if a stop string ended the choice.

        The caller then aborts the choice in the engine.
        """
        choice = self.output.outputs[step.choice]
        self.output.num_cached_tokens = max(self.output.num_cached_tokens, step.cached_tokens)
        if step.prompt_logprobs is not None:
            self.output.prompt_logprobs = [None, *self._prompt_positions(step.prompt_logprobs)]
        reason = None if step.finish_reason is None else str(step.finish_reason)
        count, stop = len(step.token_ids), None
        text = self._texts[step.choice]
        if text is not None:
            piece = text.push(step.token_ids, finish_reason=reason, stop_token=step.stop_token)
            choice.text += piece.text
            count, stop = piece.tokens, piece.stop
        choice.token_ids.extend(step.token_ids[:count])
        self._add_logprobs(choice, step, count)
        choice.finish_reason = reason if stop is None else "stop"
        choice.stop_reason = step.stop_token if stop is None else stop
        if step.reason is not None:
            choice.stop_reason = step.reason
        self._note(count)
        return stop is not None and reason is None

    def take(self) -> RequestOutput | None:
        """The request's output in its kind after a step; None if there is none."""
        match self._kind:
            case RequestOutputKind.FINAL_ONLY:
                return self.output if self.output.finished else None
            case RequestOutputKind.CUMULATIVE:
                return replace(self.output, outputs=[_copy(one) for one in self.output.outputs])
            case RequestOutputKind.DELTA:
                return replace(self.output, outputs=[*self._deltas()])

    def _deltas(self) -> Iterable[CompletionOutput]:
        """The new part of each choice that has one."""
        for choice in self.output.outputs:
            characters, tokens = self._taken[choice.index]
            now = (len(choice.text), len(choice.token_ids))
            if now == (characters, tokens) and not (choice.finished and self.output.finished):
                continue
            self._taken[choice.index] = now
            delta = _copy(choice)
            delta.text = choice.text[characters:]
            delta.token_ids = choice.token_ids[tokens:]
            if choice.logprobs is not None:
                delta.logprobs = choice.logprobs[tokens:]
            yield delta

    def _note(self, tokens: int) -> None:
        now = time.time()
        if tokens:
            self.metrics.num_generation_tokens += tokens
            self.metrics.last_token_time = now
            if self.metrics.first_token_time is None:
                self.metrics.first_token_time = now
        if all(choice.finished for choice in self.output.outputs):
            self.output.finished = True
            self.metrics.finished_time = now

    def _add_logprobs(self, choice: CompletionOutput, step: SequenceOutput, count: int) -> None:
        if choice.logprobs is None or step.logprobs is None:
            return
        for token_id, found in zip(step.token_ids[:count], step.logprobs[:count], strict=True):
            choice.logprobs.append(self._position(token_id, found))
            choice.cumulative_logprob = (choice.cumulative_logprob or 0.0) + found.logprob

    def _prompt_positions(self, found: Iterable[TokenLogprobs]) -> Iterable[dict[int, Logprob]]:
        return map(self._position, self.output.prompt_token_ids[1:], found)

    def _position(self, token_id: int, found: TokenLogprobs) -> dict[int, Logprob]:
        entries: Iterable[tuple[int, float, int]] = (
            (top_id, logprob, rank) for rank, (top_id, logprob) in enumerate(found.top, start=1)
        )
        position = {
            top_id: self._logprob(top_id, logprob, rank) for top_id, logprob, rank in entries
        }
        chosen = self._logprob(token_id, found.logprob, found.rank)
        return {token_id: chosen, **position}

    def _logprob(self, token_id: int, logprob: float, rank: int) -> Logprob:
        text = None
        if self._tokenizer is not None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
        return Logprob(logprob, rank, text)


def _copy(choice: CompletionOutput) -> CompletionOutput:
    logprobs = None if choice.logprobs is None else list(choice.logprobs)
    return replace(choice, token_ids=list(choice.token_ids), logprobs=logprobs)
