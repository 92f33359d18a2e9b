"""The `headrace` command. Starts the other processes, and looks at running ones.

Imports headrace_common, no other package.
"""
