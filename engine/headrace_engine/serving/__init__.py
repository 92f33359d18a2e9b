"""The serving process: takes requests from the queue, renews their leases, sends replies in order.

Imports engine, and is the only subpackage that uses Redis, asyncio and OpenTelemetry.
"""
