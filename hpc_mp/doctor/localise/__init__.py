"""Localisation of bad nodes, rails, uplinks and links from the rates of pairs: rounds, fit, retests, verdict. Pure.

The measurement is an injected function, so that everything can be tested on simulated clusters.
"""

from hpc_mp.doctor.localise.binary import of_pairs
from hpc_mp.doctor.localise.procedure import localise
from hpc_mp.doctor.localise.record import LINK, Localisation, Measure, Pair, RailSample, Suspect, nodes_of

__all__ = ["LINK", "Localisation", "Measure", "Pair", "RailSample", "Suspect", "localise", "nodes_of", "of_pairs"]
