"""The engine's own scheduler in virtual time: it decides as usual, and steps are not computed."""
