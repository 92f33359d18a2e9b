"""Errors of the engine's core.

EngineError
├── ConfigError        a setting, or a field of a checkpoint's config.json, cannot be served
├── CheckpointError    a file of a checkpoint is missing, broken or not allowed
├── RequestError       a request cannot be run by this engine (too long, token id out of range)
├── IllegalTransition  a sequence was asked to change to a state that its table does not allow
├── OutOfBlocks        the block pool was asked for more than it can give: a bug of the caller
├── RankFailed         a process that holds a part of the model ended or broke off
"""


class EngineError(Exception):
    code = "engine_error"


class ConfigError(EngineError):
    code = "config_invalid"


class CheckpointError(EngineError):
    code = "checkpoint_invalid"


class RequestError(EngineError):
    code = "request_invalid"


class IllegalTransition(EngineError):
    code = "illegal_transition"


class OutOfBlocks(EngineError):
    code = "out_of_blocks"


class RankFailed(EngineError):
    code = "rank_failed"
