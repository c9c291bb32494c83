"""Clusters in a cloud subscription: Azure CycleCloud. Frozen."""
