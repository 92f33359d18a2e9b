"""Runs steps one after the other: schedule, execute, update; its thread, and its profiler.

Imports the scheduler; the runner is passed to it.
"""
