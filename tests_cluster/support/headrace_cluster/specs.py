"""ModelServices of the demo model, small enough for several engines on two cores."""

from typing import Any

from headrace_cluster.kubectl import Manifest

API_VERSION = "headrace.dev/v1alpha1"
MODEL = "demo"
# Few sequences for each engine, so that a small load makes a backlog; float32, so that tokens are
# exact.
ENGINE_SETTINGS: dict[str, Any] = {
    "dtype": "float32",
    "threads": 1,
    "maxNumSeqs": 4,
    "kvCacheMemory": "64MiB",
    "lease": 5,
    "beatInterval": 1,
}


def demo_service(name: str = MODEL, **spec: Any) -> Manifest:
    """The demo model's ModelService.

    `spec` replaces whole sections; by default one engine, which is not scaled.
    """
    sections: Manifest = {
        "model": {"servedName": name, "local": {"path": "headrace-demo"}},
        "replicas": 1,
        "engine": {
            "settings": dict(ENGINE_SETTINGS),
            "resources": {
                "requests": {"cpu": "50m", "memory": "512Mi"},
                "limits": {"memory": "3Gi"},
            },
        },
        "drain": {"timeoutSeconds": 60},
        "scaling": {"mode": "none"},
    }
    return {
        "apiVersion": API_VERSION,
        "kind": "ModelService",
        "metadata": {"name": name},
        "spec": {**sections, **spec},
    }
