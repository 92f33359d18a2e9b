"""Copies of arrays to and from the device, scratch memory, and measured device time.

Imports no other subpackage.
"""
