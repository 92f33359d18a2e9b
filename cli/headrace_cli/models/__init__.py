"""`headrace models`: says what the processes make of a checkpoint, and fetches one.

Imports doctor, machine and tables.
"""
