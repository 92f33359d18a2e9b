"""A ModelService's spec: raw objects are parsed into checked ones; the CRD is generated from them.

Imports scaling, names and errors.
"""
