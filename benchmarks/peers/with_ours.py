"""Our engine in a loop of one's own."""

from functools import partial

from torch import Tensor
from workload import ADAMW, Layout, Step, batch_of, llama_model

import hpc_mp


def ours(layout: Layout, schedule: str = "1f1b") -> Step:
    run = hpc_mp.parallel(
        llama_model(), pp_size=layout.pipeline, tp_size=layout.tensor, zero=layout.zero, microbatches=layout.microbatches,
        schedule=schedule, precision=layout.precision, clip=0.0, device="cpu",
        optimizer={"name": "adamw", "no_decay": [], **ADAMW, "betas": list(ADAMW["betas"])})

    def step(number: int) -> Tensor:
        ids, labels = batch_of(number)
        return run.step({"input_ids": ids, "labels": labels})

    return step


WAYS = {"ours": ours, "ours, zero bubble": partial(ours, schedule="zero_bubble")}
