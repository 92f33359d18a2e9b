"""The HTTP server: the application, its routes, bounded bodies, and errors in the form of each API.

Imports every other subpackage.
"""
