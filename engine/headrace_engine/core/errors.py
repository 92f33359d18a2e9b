"""Errors of the engine's core.

EngineError
├── ConfigError        a setting, or a field of a checkpoint's config.json, is not supported.
│   └── ContextTooLong      max_model_len is above the longest context of the checkpoint.
├── CheckpointError    a file of a checkpoint is missing, broken or not allowed.
│   └── CheckpointNotFound  the checkpoint does not exist.
├── RequestError       this engine cannot run a request (too long, token id out of range).
├── IllegalTransition  a sequence may not change to this state (see request.TRANSITIONS).
├── OutOfBlocks        the block pool is empty: a bug of the caller, which checks first.
└── RankFailed         a process that holds a part of the model ended or failed.
"""


class EngineError(Exception):
    code = "engine_error"


class ConfigError(EngineError):
    code = "config_invalid"


class ContextTooLong(ConfigError):
    """`max_model_len` is above the longest context of the checkpoint."""


class CheckpointError(EngineError):
    code = "checkpoint_invalid"


class CheckpointNotFound(CheckpointError):
    """There is no such folder, and the hub has no such repository."""

    code = "model_not_found"


class RequestError(EngineError):
    code = "request_invalid"


class IllegalTransition(EngineError):
    code = "illegal_transition"


class OutOfBlocks(EngineError):
    code = "out_of_blocks"


class RankFailed(EngineError):
    code = "rank_failed"
