"""Checks files of requests and runs them through the gateway's own API; one gateway leads each
batch.

Imports generation and the subpackages below it.
"""
