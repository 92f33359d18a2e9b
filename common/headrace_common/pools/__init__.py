"""Pools of killable processes for work on clients' input, and of slots that tenants share.

Imports no other subpackage.
"""
