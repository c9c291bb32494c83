"""NCCL's actual behaviour, from its own log and from the counters of the network's ports."""
