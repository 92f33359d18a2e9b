"""Images as models read them: the tokens that one becomes, its place in a prompt, and decoding.

Knows no torch and no queue. Imports wire and text. Only `decoding` needs Pillow.
"""
