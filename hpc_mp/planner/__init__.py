"""What a layout costs: memory, traffic, collectives and fabrics; and which orders of ranks and hosts cost least."""
