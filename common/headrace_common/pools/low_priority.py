"""Lowers the priority of the process that imports it, and so of the processes that it starts.

The event loop and the engine's steps come first where cores are shared.
"""

import os

os.nice(10)
