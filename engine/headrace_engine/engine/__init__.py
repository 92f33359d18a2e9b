"""Runs steps one after the other (schedule, execute, update), in a thread of its own, and profiles
them.

Imports the scheduler; the runner is passed to it.
"""
