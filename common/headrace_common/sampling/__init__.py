"""The parameters with which users control sampling and pooling.

Imports structured.
"""
