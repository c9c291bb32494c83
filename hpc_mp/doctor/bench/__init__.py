"""How fast ranks exchange data: collectives timed as nccl-tests times them, beside what the fabric should give."""
