"""Which node or link is bad: checks of a node, the survey of a cluster, the localiser, bandwidth and computing."""
