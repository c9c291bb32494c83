"""Rendering of a directory for CycleCloud from a size and a number of nodes: ``hpc-mp cloud render``."""

from __future__ import annotations

from hpc_mp.clouds.azure.render.options import Choices, ClusterPlan, Storage, find_size, settle, sizes_on_offer
from hpc_mp.clouds.azure.render.summary import AzureSummary, azure_summary, words
from hpc_mp.clouds.azure.render.workspace import SERVER, Workspace, choices_within
from hpc_mp.clouds.azure.render.write import refuse_full, write

__all__ = ["SERVER", "AzureSummary", "Choices", "ClusterPlan", "Storage", "Workspace", "azure_summary", "choices_within",
           "find_size", "refuse_full", "settle", "sizes_on_offer", "words", "write"]
