"""An offline linter of cluster templates of Azure CycleCloud, for ``hpc-mp cloud lint`` and ``hpc-mp lint``."""
