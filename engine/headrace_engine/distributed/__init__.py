"""One model over several processes: the commands of rank 0, the other ranks, and how they end.

Imports model_loader and the subpackages below it.
"""
