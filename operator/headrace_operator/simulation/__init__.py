"""Simulates scaling policies in virtual time: the real `decide` with a model of the engines.

The queue's bounds and the decision are the product's own; requests, engines and pods are modelled.
"""
