"""A CycleCloud cluster of machines on this one, each with a system of its own, to run the cluster-init specs for real."""
