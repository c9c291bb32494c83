"""Which node, rail, uplink or link is bad, from the rates of pairs: rounds, fit, retests, verdict. Pure.

The measurement is an injected function, so that all of this is tested on simulated clusters.
"""

from hpc_mp.doctor.localise.procedure import localise
from hpc_mp.doctor.localise.sample import Measure, Pair, Sample, Suspect, Verdict

__all__ = ["Measure", "Pair", "Sample", "Suspect", "Verdict", "localise"]
