"""The console: the files of its page, and the live data that it shows.

Imports queue_client, models and settings.
"""
