"""Decoders with recurrent layers: their layers and families."""
