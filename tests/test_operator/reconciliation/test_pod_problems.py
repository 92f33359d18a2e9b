"""Each cause that keeps pods from starting has its own reason, with a remedy."""

from typing import Any

import pytest

from headrace_operator.reconciliation.pod_problems import problem
from headrace_testing.kubernetes import pod


def engine_pod(**container: Any) -> dict[str, Any]:
    found = pod("a", "m", ready=False)
    found["status"]["containerStatuses"] = [{"name": "engine", **container}]
    return found


def ended(code: int, **more: Any) -> dict[str, Any]:
    """The status of a container that waits to be restarted after this exit."""
    return {
        "state": {"waiting": {"reason": "CrashLoopBackOff", "message": "back-off 10s"}},
        "lastState": {"terminated": {"exitCode": code, **more}},
    }


def test_an_unschedulable_pod_is_reported() -> None:
    fine, stuck = pod("a", "m"), pod("b", "m", ready=False)
    assert problem([fine]) is None
    text = "0/3 nodes are available: 3 Insufficient nvidia.com/gpu"
    stuck["status"]["conditions"] = [
        {"type": "PodScheduled", "status": "False", "reason": "Unschedulable", "message": text}
    ]
    assert problem([fine, stuck]) == ("Unschedulable", f"pod b: {text}")


def test_a_crash_is_reported_with_its_exit_code() -> None:
    assert problem([engine_pod(**ended(1))]) == (
        "CrashLoopBackOff",
        "pod a: container engine ended with exit code 1",
    )


@pytest.mark.parametrize(
    ("message", "reason", "text"),
    [
        (
            "model_not_found: /models/x: no such folder",
            "ModelNotFound",
            "/models/x: no such folder",
        ),
        ("hub_unreachable: a/b: no way to it", "HubUnreachable", "a/b: no way to it"),
        ("backend_unfit: redis 5 is too old", "RedisUnfit", "redis 5 is too old"),
        ("checkpoint_invalid: x is missing", "CheckpointInvalid", "x is missing"),
        ("loading\nValueError: no\n", "CrashLoopBackOff", "ValueError: no"),
        (
            '{"level": "ERROR", "message": "engine cannot serve", "code": "config_invalid", '
            '"error": "dtype: no"}',
            "ConfigInvalid",
            "engine cannot serve: dtype: no",
        ),
        (
            'ckpt.py\\", line 9, in resolve\\n    raise\\nOSError: no way to the hub"}',
            "CrashLoopBackOff",
            "OSError: no way to the hub",
        ),
    ],
)
def test_the_termination_message_of_an_engine_is_the_reason(
    message: str, reason: str, text: str
) -> None:
    found = problem([engine_pod(**ended(70, message=message))])
    assert found == (reason, f"pod a: container engine ended with exit code 70: {text}")


def test_too_little_memory_is_reported_with_the_limit_and_a_remedy() -> None:
    crashed = engine_pod(**ended(137, reason="OOMKilled", message='{"message": "loading"}'))
    (container,) = crashed["spec"]["containers"]
    container["resources"] = {"limits": {"memory": "2Gi"}}
    found = problem([crashed])
    assert found is not None
    assert found[0] == "OOMKilled"
    assert found[1].startswith("pod a: container engine was killed because it took more memory")
    assert "its limit of 2Gi: raise engine.resources.limits.memory" in found[1]


@pytest.mark.parametrize("end", [{"exitCode": 137, "reason": "OOMKilled"}, {"exitCode": 78}])
def test_problems_that_a_restart_cannot_fix_are_reported_at_the_first_exit(
    end: dict[str, Any],
) -> None:
    between = engine_pod(state={"terminated": end})
    once_more = engine_pod(state={"running": {}}, restartCount=1, lastState={"terminated": end})
    found = problem([between])
    assert found is not None
    assert problem([once_more]) == found


def test_a_single_crash_of_another_kind_is_not_reported() -> None:
    crashed = {"terminated": {"exitCode": 70, "message": "rank_failed: rank 1 ended"}}
    assert problem([engine_pod(state={"running": {}}, restartCount=1, lastState=crashed)]) is None
    found = problem([engine_pod(state={"running": {}}, restartCount=2, lastState=crashed)])
    assert found is not None
    assert found[0] == "RankFailed"


def test_a_container_that_serves_again_is_not_reported() -> None:
    crashed = {"terminated": {"exitCode": 78}}
    serving = engine_pod(state={"running": {}}, restartCount=3, lastState=crashed, ready=True)
    assert problem([serving]) is None


def test_a_failed_image_pull_keeps_the_reason_of_kubernetes() -> None:
    waits = [
        engine_pod(state={"waiting": {"reason": word, "message": "no such image"}})
        for word in ("ErrImagePull", "ImagePullBackOff")
    ]
    assert [problem([each]) for each in waits] == [
        ("ImagePullBackOff", "pod a: no such image"),
        ("ImagePullBackOff", "pod a: no such image"),
    ]


def test_a_missing_secret_is_named() -> None:
    text = 'secret "hf" not found'
    waiting = {"reason": "CreateContainerConfigError", "message": text}
    assert problem([engine_pod(state={"waiting": waiting})]) == (
        "CreateContainerConfigError",
        f"pod a: {text}",
    )
