"""kopf's events wake one task for each ModelService.

Imports every other subpackage.
"""
