"""`headrace models`: shows how the processes would serve a checkpoint, and fetches one.

Imports doctor, machine and tables.
"""
