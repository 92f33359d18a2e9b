"""Finds why engine pods do not start, with pure functions: one word for each cause, and the remedy.

A cause keeps its word while the kubelet tries again, so that it gives one event and not one for
each attempt.
"""

import json
from collections.abc import Iterable, Mapping
from typing import Any

from headrace_common.config.process import EXIT_CONFIG

Manifest = Mapping[str, Any]
Problem = tuple[str, str]

CRASHES = 2  # restarts after which a container that is not ready counts as crashing
CRASHED = "CrashLoopBackOff"
OUT_OF_MEMORY = "OOMKilled"
MAX_CHARS = 400
# Waiting states of a container that do not end by themselves, each with its word.
_BAD_WAITS = {
    "ErrImagePull": "ImagePullBackOff",  # the kubelet shows the two in turn
    "ImagePullBackOff": "ImagePullBackOff",
    **{
        word: word
        for word in (
            *("InvalidImageName", "ErrImageNeverPull"),
            *("CreateContainerConfigError", "CreateContainerError", "RunContainerError"),
        )
    },
}
# Words for some error codes; for others the word is the code in camel case.
_WORDS = {"backend_unavailable": "RedisUnreachable", "backend_unfit": "RedisUnfit"}


def problem(pods: Iterable[Manifest]) -> Problem | None:
    """(reason, message) of the first pod that will not start however long one waits."""
    for pod in pods:
        if found := _unscheduled(pod) or _broken(pod):
            return found[0], f"pod {pod['metadata']['name']}: {found[1]}"
    return None


def _unscheduled(pod: Manifest) -> Problem | None:
    for condition in pod.get("status", {}).get("conditions", ()):
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("reason", "Unschedulable")), condition.get("message", "")
    return None


def _broken(pod: Manifest) -> Problem | None:
    status = pod.get("status", {})
    containers = (
        *status.get("initContainerStatuses", ()),
        *status.get("containerStatuses", ()),
    )
    found = (_cannot_start(one) or _crashed(pod, one) for one in containers)
    return next((problem for problem in found if problem is not None), None)


def _cannot_start(container: Manifest) -> Problem | None:
    waiting = container.get("state", {}).get("waiting", {})
    word = _BAD_WAITS.get(waiting.get("reason", ""))
    return None if word is None else (word, _clean(waiting.get("message", "")))


def _crashed(pod: Manifest, container: Manifest) -> Problem | None:
    """The reason why a container ended, if it will happen again or has happened repeatedly."""
    if container.get("ready"):
        return None
    state = container.get("state", {})
    ended = state.get("terminated") or container.get("lastState", {}).get("terminated") or {}
    backs_off = state.get("waiting", {}).get("reason") == CRASHED
    certain = ended.get("reason") == OUT_OF_MEMORY or ended.get("exitCode") == EXIT_CONFIG
    if not (backs_off or certain or container.get("restartCount", 0) >= CRASHES):
        return None
    if ended.get("reason") == OUT_OF_MEMORY:
        return OUT_OF_MEMORY, _out_of_memory(pod, container)
    code, text = _last_word(str(ended.get("message") or ""))
    return (_word(code) if code else CRASHED), _end(container, ended, text)


def _out_of_memory(pod: Manifest, container: Manifest) -> str:
    name = str(container.get("name"))
    limit = _memory_limit(pod, name)
    if limit is None:
        return (
            f"container {name} was killed because the node ran out of memory: "
            "set engine.resources.requests.memory to what the engine needs"
        )
    return (
        f"container {name} was killed because it took more memory than its limit of {limit}: "
        "raise engine.resources.limits.memory, or lower engine.settings.kvCacheMemory"
    )


def _memory_limit(pod: Manifest, name: str) -> object:
    for container in pod.get("spec", {}).get("containers", ()):
        if container["name"] == name:
            return container.get("resources", {}).get("limits", {}).get("memory")
    return None


def _end(container: Manifest, ended: Manifest, text: str) -> str:
    """How a container's last run ended, with its last message if there is one."""
    name = container.get("name")
    if not ended:
        return f"container {name} ends again and again"
    ending = f"container {name} ended with exit code {ended.get('exitCode')}"
    if ended.get("reason") not in (None, "Error"):
        ending += f" ({ended['reason']})"
    return f"{ending}: {text}" if text else ending


def _last_word(message: str) -> tuple[str, str]:
    """The code of a Headrace error, or "", and the last line for people.

    Headrace's processes leave `code: problem`. Other processes, and those of older releases, leave
    the end of their log.
    """
    lines = [line for line in message.splitlines() if line.strip()]
    if not lines:
        return "", ""
    code, colon, text = lines[0].partition(": ")
    if len(lines) == 1 and colon and "_" in code and code.replace("_", "").islower():
        return code, _clean(text)
    return _logged(lines[-1])


def _logged(line: str) -> tuple[str, str]:
    """The message of a log line, which may be JSON, or only the end of a long line."""
    try:
        entry = json.loads(line)
    except ValueError:
        end = line.rsplit("\\n", 1)[-1].removesuffix('"}') if line.endswith('"}') else line
        return "", _clean(end)
    if not isinstance(entry, dict):
        return "", _clean(line)
    parts = (entry.get("message"), entry.get("error") or entry.get("exception.message"))
    return str(entry.get("code", "")), _clean(": ".join(str(part) for part in parts if part))


def _word(code: str) -> str:
    return _WORDS.get(code, "".join(part.capitalize() for part in code.split("_")))


def _clean(text: str) -> str:
    return " ".join(text.split())[:MAX_CHARS]
