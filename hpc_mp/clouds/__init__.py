"""Clusters in a cloud subscription: Azure CycleCloud. Frozen.

Templates and scripts are files under ``cyclecloud``. No service is queried, and only files are created.
"""
