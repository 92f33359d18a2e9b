"""Simulates an engine with continuous batching by rates of tokens, from event to event, without
single steps.

All decoding sequences get a token a step. While prompts are to be computed, each step also takes
a chunk of them and is longer for it, as in the engine's own scheduler: decodes first, then prompts
in order, within the budget of tokens a step. A request reserves KV for its whole length, so nothing
is ever preempted; the engine itself reserves less and preempts instead.
"""

from collections import deque
from heapq import heappop, heappush
from math import ceil

from .engine_profile import EngineProfile
from .events import NEVER

_NOTHING = 1e-6
"""Tokens that rounding may leave of finished work."""


class EngineCosts:
    """A profile, unpacked for speed; shared by all engines.

    Simplified: a longer context does not slow a step, and a step with few tokens is as efficient as
    a full one.
    """

    def __init__(self, profile: EngineProfile) -> None:
        self.decode_seconds = profile.step_seconds()
        self.prompt_token_seconds = 1 / profile.prefill_tokens_per_second
        self.max_num_seqs = profile.max_num_seqs
        self.budget = profile.max_num_batched_tokens
        self.kv_tokens = profile.kv_tokens

    def step(self, decodes: int, prompt_tokens: float) -> float:
        """Seconds of a step with `decodes` decoding sequences, and these prompt tokens."""
        decode = self.decode_seconds[decodes] if decodes else 0.0
        return decode + prompt_tokens * self.prompt_token_seconds


class SimulatedEngine:
    """Starts requests and knows when it next has results to `collect`. Times never go back."""

    __slots__ = (
        "_at",
        "_costs",
        "_decode_rate",
        "_decoding",
        "_tokens_per_sequence",
        "_prefill_left",
        "_prefill_rate",
        "_prefilling",
        "draining",
        "kv_used",
        "number",
        "running",
        "started_at",
        "tokens_out",
    )

    def __init__(self, number: int, costs: EngineCosts, started_at: float, now: float) -> None:
        self.number = number
        self.started_at = started_at
        self.running = 0
        self.kv_used = 0
        self.tokens_out = 0.0
        self.draining = False
        self._costs = costs
        self._at = now
        # Tokens of a sequence that has decoded since the simulation began. Each sequence ends when
        # this reaches the value stored with it, so that progress costs nothing per sequence.
        self._tokens_per_sequence = 0.0
        self._decoding: list[tuple[float, int, int]] = []
        self._prefilling: deque[tuple[int, int, int]] = deque()
        self._prefill_left = 0.0
        self._decode_rate = 0.0
        self._prefill_rate = 0.0

    def has_room(self, prompt: int, output: int) -> bool:
        """Whether a request fits. An idle engine has room for any request: too large ones are
        refused before."""
        if self.running == 0:
            return True
        fits = self.kv_used + prompt + output <= self._costs.kv_tokens
        return fits and self.running < self._costs.max_num_seqs

    def start(self, request: int, prompt: int, output: int, now: float) -> None:
        self._advance(now)
        if not self._prefilling:
            self._prefill_left = prompt
        self._prefilling.append((request, prompt, output))
        self.running += 1
        self.kv_used += prompt + output
        self._set_rates()

    def next_event(self) -> float:
        """When the first prompt or the first answer will be complete."""
        soonest = NEVER
        if self._prefilling:
            soonest = self._at + max(0.0, self._prefill_left) / self._prefill_rate
        if self._decoding:
            left = max(0.0, self._decoding[0][0] - self._tokens_per_sequence)
            soonest = min(soonest, self._at + left / self._decode_rate)
        return soonest

    def collect(self, now: float) -> tuple[list[int], list[int]]:
        """Returns the requests that got their first token since the last call, and those that
        ended."""
        self._advance(now)
        begun: list[int] = []
        ended: list[int] = []
        while self._prefilling and self._prefill_left <= _NOTHING:
            self._end_prefill(begun, ended)
        while self._decoding and self._decoding[0][0] - self._tokens_per_sequence <= _NOTHING:
            _, request, tokens = heappop(self._decoding)
            self._end(request, tokens, ended)
        self._set_rates()
        return begun, ended

    def left(self, now: float) -> dict[int, int]:
        """Returns the tokens that each decoding request has not got yet, rounded up."""
        self._advance(now)
        return {
            request: max(1, ceil(ends - self._tokens_per_sequence - _NOTHING))
            for ends, request, _ in self._decoding
        }

    def _end_prefill(self, begun: list[int], ended: list[int]) -> None:
        request, prompt, output = self._prefilling.popleft()
        begun.append(request)
        self.tokens_out += 1
        if output > 1:
            item = (self._tokens_per_sequence + output - 1, request, prompt + output)
            heappush(self._decoding, item)
        else:
            self._end(request, prompt + output, ended)
        self._prefill_left = self._prefilling[0][1] if self._prefilling else 0.0

    def _end(self, request: int, tokens: int, ended: list[int]) -> None:
        self.running -= 1
        self.kv_used -= tokens
        ended.append(request)

    def _advance(self, now: float) -> None:
        passed = now - self._at
        if passed > 0:
            made = passed * self._decode_rate
            self._tokens_per_sequence += made
            self.tokens_out += made * len(self._decoding)
            self._prefill_left -= passed * self._prefill_rate
            self._at = now

    def _set_rates(self) -> None:
        decoding = len(self._decoding)
        chunk = 0.0
        if self._prefilling:
            # One step computes the rest of the first prompt and as many of the next ones as fit.
            waiting = self._prefill_left + sum(item[1] for item in list(self._prefilling)[1:4])
            chunk = min(self._costs.budget - decoding, max(1.0, waiting))
        step = self._costs.step(decoding or 1, chunk)
        self._prefill_rate = chunk / step
        self._decode_rate = 1 / step if decoding else 0.0
