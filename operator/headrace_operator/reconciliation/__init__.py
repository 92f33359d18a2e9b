"""Compares the desired state with the present one: applies it, scales it, writes the status.

Imports signals, desired, cluster, spec and scaling.
"""
