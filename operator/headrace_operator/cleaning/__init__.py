"""Background tasks that check all models: unclaimed entries of the registry, and Redis users.

Imports reconciliation, desired and cluster.
"""
