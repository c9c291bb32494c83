"""Localisation of bad nodes, rails, uplinks and links from the rates of pairs: rounds, fit, retests, verdict. Pure.

The measurement is an injected function, so that everything can be tested on simulated clusters.
"""

from hpc_mp.doctor.localise.procedure import localise
from hpc_mp.doctor.localise.record import Localisation, Measure, Pair, RailSample, Suspect

__all__ = ["Localisation", "Measure", "Pair", "RailSample", "Suspect", "localise"]
