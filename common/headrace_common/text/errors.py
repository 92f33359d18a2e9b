"""Errors of a checkpoint's small files."""

from ..errors import HeadraceError


class TokenizerError(HeadraceError):
    """A tokenizer's file is missing or cannot be read; the message names it."""

    code = "tokenizer_invalid"


class ModelNotFound(TokenizerError):
    """There is no such folder, and the hub has no such repository."""

    code = "model_not_found"


class HubUnreachable(TokenizerError):
    """The hub does not answer, and nothing of the repository is cached."""

    code = "hub_unreachable"
