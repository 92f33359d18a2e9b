"""Metadata of every child: name, labels, and the owner whose deletion removes it."""

from typing import Any

from .. import names
from ..spec.model_service import ModelService


def metadata(service: ModelService, name: str) -> dict[str, Any]:
    return {
        "name": name,
        "namespace": service.namespace,
        "labels": names.labels(service.name),
        "ownerReferences": [
            {
                "apiVersion": names.API_VERSION,
                "kind": names.KIND,
                "name": service.name,
                "uid": service.uid,
                "controller": True,
                "blockOwnerDeletion": False,
            }
        ],
    }
