"""A first job file that can run on the available hardware: ``slurm/job.toml.j2``, filled in."""

import sysconfig
from dataclasses import dataclass

import jinja2

from hpc_mp.base.assets import asset
from hpc_mp.cluster.slurm.limits import seconds
from hpc_mp.cluster.slurm.site import SlurmSite, ThisMachine
from hpc_mp.job.values import toml_value

TEMPLATE = "slurm/job.toml.j2"
TIME_LIMIT_S = 30 * 60
GIB, MIB = 2**30, 2**20
MEMORY_PER_CPU = 2 * GIB  # need of a rank of the small model on CPUs, with a margin

# Emulated ranks: required (cores, GiB of memory), (nodes, ranks per node). A rank takes half a GiB before it holds any model;
# two cores carry four ranks of the small one.
EMULATED = (((2, 4), (2, 2)), ((1, 2), (2, 1)), ((0, 0), (1, 1)))


@dataclass(frozen=True, slots=True)
class ModelSize:
    """A GPT-2-style model and its sequences, in tokens; ``vocabulary`` also bounds the tokenizer trained for it."""

    layers: int
    hidden: int
    heads: int
    vocabulary: int
    sequence: int
    precision: str
    learning_rate: float


SMALL = ModelSize(layers=4, hidden=128, heads=4, vocabulary=2048, sequence=128, precision="fp32", learning_rate=1e-3)
LARGE = ModelSize(layers=12, hidden=1024, heads=16, vocabulary=8192, sequence=512, precision="bf16", learning_rate=3e-4)


@dataclass(frozen=True, slots=True)
class FirstJob:
    """The layout of a first job: the place of its ranks, their device, and how they share the model."""

    nodes: int
    ranks_per_node: int
    device: str
    size: ModelSize

    @property
    def tensor(self) -> int:
        """2 if the ranks of a node pair up, so that their traffic stays inside the node; else 1."""
        return 2 if self.ranks_per_node % 2 == 0 else 1

    @property
    def pipeline(self) -> int:
        return 2 if self.nodes * self.ranks_per_node // self.tensor % 2 == 0 else 1

    @property
    def data(self) -> int:
        return self.nodes * self.ranks_per_node // (self.tensor * self.pipeline)


def choose(machine: ThisMachine, site: SlurmSite | None) -> FirstJob:
    """Return two nodes of Slurm with a rank per GPU, or as many as a user may have; else the GPUs here; else emulated ranks."""
    if site is not None:
        per_user = site.terms.quality.per_user if site.terms.quality else {}
        nodes = min(2, len(site.kind.nodes), max(1, per_user.get("node", 2)))
        if gpus := min(site.kind.gpu_count, per_user.get("gres/gpu", site.kind.gpu_count)):
            return FirstJob(min(nodes, per_user.get("gres/gpu", 2 * gpus) // gpus), gpus, "auto", LARGE)
        return FirstJob(nodes, min(2, site.cpus), "cpu", SMALL)
    if machine.gpus:
        return FirstJob(1, len(machine.gpus), "auto", LARGE)
    nodes, ranks = next(layout for (cores, gib), layout in EMULATED if machine.cores >= cores and machine.memory >= gib * GIB)
    return FirstJob(nodes, ranks, "auto", SMALL)


def job_text(machine: ThisMachine, site: SlurmSite | None) -> str:
    """Return a commented job file for the detected hardware; ``site`` is None without Slurm."""
    start, limit = choose(machine, site), site.terms.max_wall if site else None
    jinja = jinja2.Environment(finalize=toml_value, undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True,
                               keep_trailing_newline=True, autoescape=False)
    return jinja.from_string(asset(TEMPLATE).read_text(encoding="utf-8")).render(
        start=start, site=site, corpus=f"{sysconfig.get_paths()['stdlib']}/*.py",
        time_limit=limit if limit and seconds(limit) < TIME_LIMIT_S else "00:30:00", extra=_extra(site, start) if site else {})


def _extra(site: SlurmSite, start: FirstJob) -> dict[str, str | int]:
    """Return a rank's share of the CPUs and memory of a node with GPUs; without GPUs a CPU per rank and its memory."""
    if site.kind.gpu_count:
        return {"cpus-per-task": max(1, site.cpus // start.ranks_per_node), "mem": "0"}
    return {"mem-per-cpu": f"{min(MEMORY_PER_CPU, site.kind.memory // site.kind.cpus) // MIB}M"}
