"""The native decoder: its weights, its layers on one device or several, and its step in one native
call."""
