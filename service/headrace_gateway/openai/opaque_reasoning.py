"""Reasoning as one opaque text (`encrypted_content`), for clients that store conversations.

Such clients (for example Codex) send reasoning back only in this form. It hides nothing: the answer
has the same reasoning in clear, and a client may send any reasoning in clear. So it is packed with
a checksum, and gateways need no common key.
"""

import base64
import binascii
import zlib

_PREFIX = "hr1."
_CHECK_BYTES = 4


class UnreadableReasoning(ValueError):
    """This server did not make the text, or it was changed."""


def seal(reasoning: str) -> str:
    content = reasoning.encode()
    check = zlib.crc32(content).to_bytes(_CHECK_BYTES)
    return _PREFIX + base64.urlsafe_b64encode(check + content).decode()


def unseal(sealed: str) -> str:
    """Returns what `seal` was given. Raises UnreadableReasoning."""
    prefix, text = sealed[: len(_PREFIX)], sealed[len(_PREFIX) :]
    try:
        packed = base64.b64decode(text.encode(), altchars=b"-_", validate=True)
        reasoning = packed[_CHECK_BYTES:].decode()
    except (binascii.Error, UnicodeError) as error:
        raise UnreadableReasoning from error
    check = zlib.crc32(packed[_CHECK_BYTES:]).to_bytes(_CHECK_BYTES)
    if prefix != _PREFIX or packed[:_CHECK_BYTES] != check:
        raise UnreadableReasoning
    return reasoning
