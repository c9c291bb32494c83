"""Clusters made from a subscription: Azure CycleCloud. Frozen.

Templates and scripts are files under ``cyclecloud``. Nobody is asked and nothing is created but files.
"""
