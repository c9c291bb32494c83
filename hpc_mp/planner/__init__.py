"""The costs of a layout: memory, traffic, collectives and fabrics; and the orders of ranks and hosts that cost least."""
