"""The cluster-wide diagnosis: an agent on every node, rounds of disjoint pairs, and what their answers say together."""
