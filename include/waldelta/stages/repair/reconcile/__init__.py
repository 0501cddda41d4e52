"""Reconciliation: whether a target holds what its source holds, told by checksums that both sides
compute.
"""
