"""OpenTelemetry, the names of all metrics, log lines, and the port of `/metrics` and `/health`.

Imports protocol and wire.
"""
