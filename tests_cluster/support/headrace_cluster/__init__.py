"""Support for the tests on a real cluster: kubectl, helm, load through the ingress, pictures."""
