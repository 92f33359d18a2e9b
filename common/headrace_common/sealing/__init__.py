"""Seals prompts and answers before they go to Redis, and opens them again.

May import only `errors` and `followed_file`; the queue protocol and the processes import it. What
leaves it: `Sealer`, `PayloadKind`, the keyring and its file.
"""
