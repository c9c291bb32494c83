"""``hpc_mp.parallel``: a model divided over the ranks that call it."""

import atexit
import ctypes
import sys
import threading
from dataclasses import replace
from functools import lru_cache
from typing import Any, NoReturn

import torch.distributed as dist

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.layout import undivided
from hpc_mp.job.learning_rate import check_factors
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.train.own_loop.keywords import Keywords, in_words_of_a_loop, job_of, product, read_keywords
from hpc_mp.train.own_loop.run import Axes, Run
from hpc_mp.train.own_loop.subject import subject_of
from hpc_mp.train.own_loop.world import join, ranks
from hpc_mp.train.parallel.communicators import axis_of, build
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.assemble import check_compiler, check_precision, settings_of
from hpc_mp.train.step.engine import Engine

PATIENCE_S = 60.0  # that a rank waits at the end of its program for the others to end theirs


def parallel(model: Any, **keywords: Any) -> Run:
    """Divide a model over all ranks, for a training loop of one's own. All ranks call this.

    ::

        run = hpc_mp.parallel("checkpoints/qwen3-8b", tp_size=2, pp_size=2, zero=1, microbatches=8, precision="bf16",
                              optimizer={"name": "adamw", "lr": 3e-4})
        for batch in loader:
            loss = run.step(batch)
        run.save("out")

    Args:
        model: the directory of a Hugging Face model, its configuration (also as a dict) or the model itself; an ``nn.Module``
            with ``hpc_mp.CutPoint()`` between its parts; an ``nn.Sequential``; a list of ``hpc_mp.LayerSpec``.
        keywords: tp_size, pp_size, cp_size, ep_size, zero, microbatches, schedule, precision, optimizer … as listed in the
            reference; the data degree is what is left of the ranks.

    Raises:
        HpcMpError: the model cannot be divided so, or the ranks cannot meet. Nothing has been started.
    """
    read = read_keywords(keywords)
    try:
        run = _started(model, read)
        if read.example is not None:
            run.check(read.example)
    except HpcMpError as error:
        raise in_words_of_a_loop(error) from None
    _end_together(run.world.host)
    atexit.register(run.close)  # before ranks end together
    return run


def _started(model: Any, keywords: Keywords) -> Run:
    """Check everything that one process can check, meet the other ranks, and divide the model."""
    subject, unit = subject_of(model, keywords), 2 * product(keywords, "context", "tensor")
    # One sample in a microbatch, with the number of tokens for which stages are balanced.
    job = job_of(keywords, subject.table, ranks(), 1, max(1, subject.sequence // unit) * unit)
    subject.check(job)
    if job.train.lr_factors:
        check_factors(job.train.lr_factors, subject.shapes())
    layout = replace(undivided(job), layers=subject.layers(job))
    world = join(job.job.device)
    check_precision(job.train.precision, world.device)
    if job.train.compile:
        check_compiler(world.device)
    if len(set(facts.gather(subject.fingerprint, world.host))) > 1:
        raise HpcMpError(f"model of type {type(model).__name__}", "has other values on other ranks",
                         "call torch.manual_seed with the same number on all ranks before you make it")
    placement, schedule = world.placement(layout.degrees, layout.order), schedule_of(layout)
    groups = build(placement, layout.shard_degree, world.device, world.backend, schedule, None, world.host,
                   expert_shards=layout.expert_cut().shards, **subject.groups(layout))
    settings = replace(settings_of(job, layout, schedule), rate=keywords.rate)
    engine = Engine(subject.model(job, {}), settings, groups, world.device)
    engine.start(subject.first_values(job))
    pipeline, data = (axis_of(placement.groups[axis], world.backend) for axis in ("pp", "dp"))  # for a user's own messages
    return Run(subject, keywords, layout, world, Axes(groups.tensor, pipeline, data, groups.context, groups.expert), engine)


@lru_cache(maxsize=1)
def _end_together(host: Tree) -> None:
    """Have ranks close their connections together when their programs end: gloo would abort a process that ends with open ones. A
    rank that fails, or that has waited long for the others, ends at once with its own exit code; they learn of it by the lost
    connections."""
    leave, codes = sys.exit, list[object]()

    def noted(code: Any = None, /) -> NoReturn:
        codes[:] = [code]
        leave(code)

    def end() -> None:
        if not dist.is_initialized():
            return
        failed = getattr(sys, "last_value", None) is not None or codes not in ([], [None], [0])
        together = threading.Thread(target=facts.barrier, args=(host,), daemon=True)
        if not failed:
            together.start()
            together.join(PATIENCE_S)
        if failed or together.is_alive():
            _leave_open()
        else:
            dist.destroy_process_group()

    sys.exit = noted  # Python tells exit handlers no code
    atexit.register(end)


def _leave_open() -> None:
    """Have the process end, when Python has, before the destructors of connections run."""
    for group in dist.distributed_c10d._world.pg_map:
        ctypes.pythonapi.Py_IncRef(ctypes.py_object(group))
    c = ctypes.CDLL(None)
    c.on_exit(c._exit, None)  # glibc calls it with the exit code
