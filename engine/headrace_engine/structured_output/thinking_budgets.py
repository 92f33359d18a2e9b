"""Makes the limits on tokens of reasoning for a model's vocabulary."""

from typing import TYPE_CHECKING

from headrace_common.sampling.params import SamplingParams

from ..core.errors import RequestError
from ..core.thinking import ThinkingBudget

if TYPE_CHECKING:
    from headrace_common.text.tokenizer import Tokenizer


class ThinkingBudgets:
    """Makes each request's limit. Thread-safe."""

    def __init__(self, tokenizer: "Tokenizer") -> None:
        self._tokenizer = tokenizer
        self._texts: dict[int, str] = {}

    def make(self, params: SamplingParams) -> ThinkingBudget | None:
        """The request's limit; None if it has none. Raises RequestError."""
        budget, form = params.thinking_token_budget, params.thinking_format
        if budget is None:
            return None
        if form is None:
            raise RequestError(
                "thinking_token_budget needs the markers of reasoning: give thinking_format"
            )
        ending = tuple(self._tokenizer.encode(form.ending, add_special_tokens=False))
        if not ending:
            raise RequestError(f"thinking_token_budget: no tokens spell {form.ending!r}")
        return ThinkingBudget(budget, form, ending, self._text_of)

    def _text_of(self, token_id: int) -> str:
        text = self._texts.get(token_id)
        if text is None:
            text = self._tokenizer.decode([token_id], skip_special_tokens=False)
            self._texts[token_id] = text
        return text
