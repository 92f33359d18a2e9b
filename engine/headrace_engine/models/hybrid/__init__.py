"""Decoders with recurrent layers, in torch: state memory, recurrences, layers and families."""
