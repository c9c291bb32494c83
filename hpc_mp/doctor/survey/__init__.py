"""The cluster-wide diagnosis: an agent on every node, rounds of disjoint pairs, and conclusions from all answers."""
