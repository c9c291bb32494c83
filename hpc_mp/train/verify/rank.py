"""A rank of a verification: the job's own engine on drawn values and samples, over gloo on this machine."""

import os
import socket
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.distributed as dist

from hpc_mp.job import JobSpec
from hpc_mp.job.layout import layout_of
from hpc_mp.layout.models import ModelShape, kv_copies
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir.rank_env import RankEnv
from hpc_mp.train.checkpoint.checkpoint import Writing
from hpc_mp.train.data import positions
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.parallel.communicators import build
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.assemble import assemble
from hpc_mp.train.rank.bootstrap import lay_out
from hpc_mp.train.rank.rendezvous import connect
from hpc_mp.train.rank.trainer import share
from hpc_mp.train.step.engine import Engine
from hpc_mp.train.verify.observed import INPUT, Observed, Output, drawn, hidden_of, watched
from hpc_mp.train.verify.samples import DrawnSamples

CPU, LOCAL = torch.device("cpu"), "127.0.0.1"


def run_rank(rank: int, spec: JobSpec, shape: ModelShape, listener: socket.socket, folder: Path) -> Observed:
    """Train the steps of a shrunk job on one rank, and save a checkpoint to ``folder``.

    Args:
        listener: a socket at which the store of rank 0 listens.
    """
    torch.manual_seed(1 + rank)  # what a model draws by itself differs among ranks
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    layout = layout_of(spec, shape)
    schedule = schedule_of(layout)
    host = connect(RankEnv(rank, spec.ranks, rank, LOCAL, "verify"), _store(rank, spec.ranks, listener), "gloo")
    groups = build(lay_out(spec), layout.shard_degree, CPU, "gloo", schedule, None, host,
                   kv_copies(shape, layout.degrees.tensor), expert_shards=layout.expert_cut().shards)
    engine = assemble(spec, shape, layout, groups, schedule, CPU)
    engine.start(drawn(spec.train.seed))
    observed = Observed()
    for stage in engine.passes.pipeline.stages.values():
        _watch(cast(TransformersStage, stage), observed)
    samples = DrawnSamples(spec, shape)
    for step in range(spec.train.steps):
        own = positions(step * spec.train.global_batch, global_batch=spec.train.global_batch, data_degree=spec.data_degree,
                        data_rank=groups.data_rank, microbatches=spec.microbatches)
        labels = samples.label_count([position for some in own for position in some])
        numbers = engine.step(step, share(spec, samples, own, step, labels, engine)).numbers()
        observed.losses.append(numbers.loss)
        observed.norms.append(numbers.norm)
        if step == 0:
            clip = spec.train.clip
            observed.gradients = [*_gradients(engine, max(1.0, (numbers.norm + 1e-6) / clip) if clip else 1.0)]
    Writing(folder, spec.train.steps, {}, groups).write_all(engine.held())
    facts.barrier(host)
    dist.destroy_process_group()
    return observed


def _store(rank: int, world: int, listener: socket.socket) -> dist.Store:
    if world == 1:
        return dist.HashStore()
    return dist.TCPStore(LOCAL, listener.getsockname()[1], world, is_master=rank == 0, wait_for_workers=False,
                         master_listen_fd=listener.fileno() if rank == 0 else None)


def _gradients(engine: Engine, scale: float) -> Any:
    """Yield the rectangles of gradients that this rank updates parameters with.

    Args:
        scale: what undoes their clipping, in which a fault of one gradient would be one of all.
    """
    for unit in engine.data.trained.values():
        for piece in unit.layout.pieces(unit.shard.rank):
            values = unit.gradient.part[piece.begin:piece.begin + piece.size].view(piece.shape)
            yield piece.slot.weight.name, piece.box, values.numpy() * scale


def _watch(stage: TransformersStage, observed: Observed) -> None:
    """Note the outputs of a stage's modules."""
    for name, module in watched(stage.family, stage):
        module.register_forward_hook(partial(_ended, stage, observed, name))
    if stage.span.first and stage.blocks:
        stage.get_submodule(stage.blocks[0]).register_forward_pre_hook(
            lambda _, args, more: _note(stage, observed, f"{INPUT}{stage.blocks[0]}", (*args, *more.values())), with_kwargs=True)


def _ended(stage: TransformersStage, observed: Observed, name: str, _: Any, args: Any, output: Any) -> None:
    _note(stage, observed, name, output)


def _note(stage: TransformersStage, observed: Observed, name: str, output: Any) -> None:
    hidden, moment = hidden_of(output), stage.around.clock.moment
    if hidden is None or moment.step or not stage.training or len(hidden) != len(moment.samples):
        return
    between = stage.tensor.share(stage.positions, 0)  # of tokens between cut layers
    places = stage.positions if hidden.shape[1] == len(stage.positions) else between
    if stage.family.decoder is not None:
        places = torch.arange(hidden.shape[1])
    if hidden.shape[1] == len(places):
        observed.outputs.setdefault(name, []).append(Output(moment.samples, places.numpy(), hidden.detach().numpy().copy()))
