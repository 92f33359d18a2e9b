"""The models that are served: those that engines register, followed and loaded.

Imports settings and errors.
"""
