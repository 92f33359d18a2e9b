"""Cuts what an engine has to say to a gateway into frames of a bounded size.

Tokens are small, and one frame holds all of a step; embeddings and the log probabilities of prompts
are kilobytes each, and those that gathered while Redis was away could be more than one message may
hold.
"""

from collections.abc import Iterator, Sequence

from ..messages import Reply, Sync, Tokens

MAX_EMBEDDING_BYTES = 4 * 2**20


def frames_of(replies: Sequence[Reply]) -> Iterator[Sequence[Reply]]:
    """All replies in order; a frame's embeddings together have MAX_EMBEDDING_BYTES, or it has one.

    No replies are one frame: a sign of life.
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
