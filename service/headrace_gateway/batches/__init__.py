"""Files of requests, checked, and run through this gateway's own API; one gateway leads each batch.

Imports generation and the subpackages below it.
"""
