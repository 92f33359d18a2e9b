"""Connections to Redis: one server, Sentinel, a cluster; retries; one connection that all tasks
share."""
