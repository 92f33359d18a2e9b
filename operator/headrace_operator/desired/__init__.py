"""The Kubernetes objects that a ModelService wants: pure functions from values to manifests."""
