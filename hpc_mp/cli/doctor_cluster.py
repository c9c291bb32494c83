"""The options of ``hpc-mp doctor`` for a survey of many nodes; what a survey needs is imported when there is one."""

from __future__ import annotations

import os
import shlex
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import expand

_PATH = click.Path(path_type=Path)
OPTIONS = (
    click.option("--nodes", type=click.IntRange(min=1), metavar="N", help="Survey so many nodes and the network between them."),
    click.option("--nodelist", metavar="LIST", help="Survey these nodes: n[1-64]."),
    click.option("--partition", metavar="NAME", help="With --nodes or --nodelist: where they are."),
    click.option("--interface", "interfaces", metavar="NAME", multiple=True,
                 help="Measure this network interface of every node; one per rail. Default: the one of the node's name."),
    click.option("--gpus", type=click.IntRange(min=1), metavar="N",
                 help="Measure between N GPUs of every node over NCCL, one by one, instead of TCP between interfaces."),
    click.option("--compute", type=click.FloatRange(min=0, min_open=True), metavar="SECONDS",
                 help="Put every GPU, or else the processors, under load for so long per kind of work, and compare them."),
    click.option("--topology", metavar="FILE", type=_PATH, help="The switches, where Slurm does not know them."),
    click.option("--srun", default="", metavar="OPTIONS", help="More options for srun: '--account=x --reservation=y'."),
    click.option("--html", metavar="FILE", type=_PATH, help="Also draw what a survey has found."),
    click.option("--then-launch", metavar="JOB.toml", type=_PATH, help="After a survey launch this job, without the bad nodes."),
)


def cluster_options(function: Callable[..., Any]) -> Callable[..., Any]:
    """Add the options of a survey to a command; it gets them as keywords, for ``answer``."""
    for option in reversed(OPTIONS):
        function = option(function)
    return function


def asked(options: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> bool:
    """Whether a survey is wanted: nodes are named, or we are in an allocation of several."""
    several = int(environ.get("SLURM_JOB_NUM_NODES", "1")) > 1
    return bool(options["nodes"] or options["nodelist"] or options["then_launch"] or several)


def answer(as_json: bool, nodes: int | None, nodelist: str | None, partition: str | None, interfaces: tuple[str, ...],
           gpus: int | None, compute: float | None, topology: Path | None, srun: str, html: Path | None,
           then_launch: Path | None) -> int:
    """Survey, and launch if wanted; the exit code: 1 where a fault was found, else that of the launch."""
    from hpc_mp.cli.doctor_survey import survey
    from hpc_mp.doctor.survey.start import SurveyRequest

    if as_json and then_launch is not None:
        raise HpcMpError("--json", "would print two documents with --then-launch", "run `hpc-mp launch --json` afterwards")
    wish = SurveyRequest(nodes, expand(nodelist) if nodelist else (), partition, interfaces, topology, gpus or 0, compute or 0.0,
                tuple(shlex.split(srun)))
    report = survey(wish, as_json, html)
    if then_launch is None:
        return 0 if report.sound else 1
    from hpc_mp.cli.launch import launch_and_tell
    from hpc_mp.cli.progress import TerminalListener
    from hpc_mp.launch.launch import LaunchRequest

    return launch_and_tell(LaunchRequest(then_launch, wait=False), TerminalListener(aside=False))
