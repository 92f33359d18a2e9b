"""Takes one request from its checked body to its answer, whole or streamed.

Imports resumable, openai and the subpackages below them.
"""
