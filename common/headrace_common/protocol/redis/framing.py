"""Splits an engine's replies to a gateway into frames of bounded size.

Tokens are small, and one frame holds those of a whole step. Embeddings and log probabilities of
prompts are kilobytes each; those that accumulate while Redis is unreachable can exceed one message.
"""

from collections.abc import Iterator, Sequence

from ...wire.messages import Reply, Sync, Tokens

MAX_EMBEDDING_BYTES = 4 * 2**20


def frames_of(replies: Sequence[Reply]) -> Iterator[Sequence[Reply]]:
    """Splits the replies, in order, into frames of at most MAX_EMBEDDING_BYTES, or of one larger
    reply.

    Without replies there is one empty frame, a keep-alive.
    """
    first = size = 0
    for index, reply in enumerate(replies):
        added = _large_bytes(reply)
        if size and added and size + added > MAX_EMBEDDING_BYTES:
            yield replies[first:index]
            first, size = index, 0
        size += added
    yield replies[first:]


def _large_bytes(reply: Reply) -> int:
    if isinstance(reply, Tokens):
        return len(reply.embedding or b"") + len(reply.prompt_logprobs or b"")
    if isinstance(reply, Sync):
        return sum(len(choice.embedding or b"") for choice in reply.choices)
    return 0
