"""Log probabilities in OpenAI's two forms: chat's (with bytes) and completions' (four lists)."""

import math
from collections.abc import Sequence
from typing import Any

from headrace_common.text.tokenizer import Tokenizer
from headrace_common.wire.messages import Logprobs

# JSON has no -infinity; OpenAI sends this for "never".
IMPOSSIBLE = -9999.0
# The entry of a prompt's first token, which has no probability.
UNKNOWN = Logprobs(math.nan, 0, ())


def chat_logprobs(
    tokenizer: Tokenizer, token_ids: Sequence[int], logprobs: Sequence[Logprobs], count: int
) -> dict[str, Any]:
    """Returns `{"content": [...]}`: one entry for each token, with up to `count` alternatives."""
    return {
        "content": [
            {
                **_entry(tokenizer, token_id, position.logprob),
                "top_logprobs": [
                    _entry(tokenizer, *alternative) for alternative in position.top[:count]
                ],
            }
            for token_id, position in zip(token_ids, logprobs, strict=True)
        ]
    }


def completion_logprobs(
    tokenizer: Tokenizer,
    token_ids: Sequence[int],
    logprobs: Sequence[Logprobs],
    count: int,
    offset: int,
) -> tuple[dict[str, Any], int]:
    """Returns the four lists, and the offset in characters of the next token."""
    tokens = [token_text(tokenizer, token_id) for token_id in token_ids]
    offsets = []
    for text in tokens:
        offsets.append(offset)
        offset += len(text)
    top = [
        None if position is UNKNOWN else _alternatives(tokenizer, token_id, position, count)
        for token_id, position in zip(token_ids, logprobs, strict=True)
    ]
    lists = {
        "text_offset": offsets,
        "token_logprobs": [
            None if position is UNKNOWN else max(position.logprob, IMPOSSIBLE)
            for position in logprobs
        ],
        "tokens": tokens,
        "top_logprobs": top,
    }
    return lists, offset


def prompt_logprobs(
    tokenizer: Tokenizer, prompt: Sequence[int], logprobs: Sequence[Logprobs], count: int
) -> list[dict[str, Any] | None]:
    """Returns vLLM's form: for each token but the first, it and the likeliest ones, by token id."""
    found: list[dict[str, Any] | None] = [None]
    for token_id, position in zip(prompt[1:], logprobs, strict=True):
        entries = {token_id: (position.logprob, position.rank)}
        for rank, (other, value) in enumerate(position.top[:count], start=1):
            entries.setdefault(other, (value, rank))
        found.append(
            {
                str(other): {
                    "logprob": max(value, IMPOSSIBLE),
                    "rank": rank,
                    "decoded_token": token_text(tokenizer, other),
                }
                for other, (value, rank) in entries.items()
            }
        )
    return found


def _alternatives(
    tokenizer: Tokenizer, token_id: int, position: Logprobs, count: int
) -> dict[str, float]:
    return {
        token_text(tokenizer, other): max(value, IMPOSSIBLE)
        for other, value in (*position.top[:count], (token_id, position.logprob))
    }


def token_text(tokenizer: Tokenizer, token_id: int) -> str:
    """Returns a single token's text; bytes that are not a character by themselves as \\xNN."""
    return tokenizer.token_bytes(token_id).decode("utf-8", errors="backslashreplace")


def _entry(tokenizer: Tokenizer, token_id: int, logprob: float) -> dict[str, Any]:
    raw = tokenizer.token_bytes(token_id)
    return {
        "token": raw.decode("utf-8", errors="backslashreplace"),
        "logprob": max(logprob, IMPOSSIBLE),
        "bytes": list(raw),
    }
