"""The words for a decision's reasons, used in conditions, events and metrics."""

from enum import StrEnum


class Reason(StrEnum):
    """Why the replica count is what it is; `sentence` explains the word."""

    sentence: str

    def __new__(cls, word: str, sentence: str) -> "Reason":
        member = str.__new__(cls, word)
        member._value_ = word
        member.sentence = sentence
        return member

    BACKLOG = (
        "BacklogTooLong",
        "The waiting work would take longer than the drain time to be done.",
    )
    OLDEST_AGE = ("OldestRequestTooOld", "A request has waited longer than the age target.")
    KV_UTILIZATION = ("KVCacheTooFull", "The engines' KV caches are fuller than the target.")
    RUNNING = ("EnginesTooBusy", "More sequences run than the engines' target share of capacity.")
    ARRIVALS = ("ArrivalsRose", "Requests arrive faster than these engines serve at their target.")
    FORECAST = ("LoadExpected", "Earlier days had more load at the time that is about to come.")
    FROM_ZERO = ("FirstRequest", "A request came while there was no engine.")
    INITIAL_SCALE = (
        "InitialScale",
        "No engine has registered the model yet, so gateways do not know it; the first one starts.",
    )
    LOAD_FELL = ("LoadFell", "Fewer engines have been enough for the whole stabilisation window.")
    IDLE = ("Idle", "There was no work for the idle time, so no engine is kept.")
    STEADY = ("Steady", "The engines fit the load.")
    CATCHING_UP = (
        "CatchingUp",
        "Requests wait, and these engines are enough to work them off within the drain time.",
    )
    STARTING = ("WaitingForStarts", "The engines that are starting will be enough.")
    BOUNDS = ("BoundsChanged", "The count was outside of the policy's replica bounds.")
    STALE_METRICS = ("MetricsStale", "The metrics are too old to act on; nothing is changed.")
    MISSING_METRICS = ("MetricsMissing", "Metrics could not be read; nothing is changed.")


class ScalingLimit(StrEnum):
    """The limit that kept the count from the recommended one."""

    MIN_REPLICAS = "TooFewReplicas"
    MAX_REPLICAS = "TooManyReplicas"
    STEP = "ScaleStepLimited"
    STABILIZATION = "ScaleStabilized"


class Signal(StrEnum):
    """The signal that a replica count is computed from."""

    ARRIVALS = "arrivals"
    RUNNING = "running"
    KV_UTILIZATION = "kv_utilization"
    BACKLOG_REQUESTS = "backlog_requests"
    BACKLOG_TOKENS = "backlog_tokens"
    OLDEST_AGE = "oldest_age"
    FORECAST = "forecast"
