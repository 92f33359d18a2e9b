"""The commands that look at a running system and make its keys.

Imports queues and key_files.
"""
