"""The plan of a job file: all decisions made before anything is started or written."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, cast

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bad_nodes import BadNode, bad_nodes, ledger
from hpc_mp.cluster.bandwidth import LinkRates, noted
from hpc_mp.cluster.slurm.allocation import Where
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.job import AnySpec, JobSpec, Spec
from hpc_mp.job.layout import check_job, check_pretrained, layout_of, profile_of, read_shape, stage_cut, undivided
from hpc_mp.job.resolution import MachineChoices, Resolution, ResolvedKey, cut, resolved
from hpc_mp.launch.choices import GpuRequest, avoid, avoided, choose_profile, spare
from hpc_mp.launch.depends import NONE, Dependencies
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.fit import with_node_memory
from hpc_mp.launch.open_layout import check_room, known_machine, open_layout
from hpc_mp.launch.render import ScriptTemplate
from hpc_mp.launch.resume import rate_schedule
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape, family_of, left_whole
from hpc_mp.layout.models.tensor import head_counts
from hpc_mp.layout.placement import Placement, place
from hpc_mp.layout.stages import StageCut
from hpc_mp.planner.activations import chunk_counts
from hpc_mp.planner.device import Device, check_memory, check_offload
from hpc_mp.planner.expectation import expect
from hpc_mp.planner.hosts import expected_slow_links
from hpc_mp.planner.measured_cut import measured_cut
from hpc_mp.planner.memory import state_bytes
from hpc_mp.planner.order import RankOrder, choose_rank_order
from hpc_mp.planner.step import estimate
from hpc_mp.planner.traffic import reduce_choice, traffic_of
from hpc_mp.rundir import RunDirectory, find_run
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.rundir.origin import adapter_fields, check_resumable, counters_of
from hpc_mp.rundir.plan import RunPlan
from hpc_mp.rundir.runs import SweepMember


@dataclass(frozen=True, slots=True)
class Target:
    """The facts about a back end that a plan needs."""

    title: str  # description of where its ranks run, for the summary of a plan
    # queries the cluster, for a job and the release of Slurm to write for (None: the detected one)
    facts: Callable[[AnySpec, Version | None], ClusterFacts]
    # returns the ranks' device, by the job and these facts. Both raise HpcMpError for unavailable resources.
    gpus: Callable[[AnySpec, ClusterFacts], GpuRequest]
    in_script: bool  # True if the job script starts the ranks, so that environment profiles and bad nodes matter
    # raises HpcMpError for a job that could never start there
    fits: Callable[[AnySpec, ClusterFacts], None] = lambda _spec, _facts: None


def asked_once(target: Target) -> Target:
    """Return the same target, which queries the cluster once for all jobs with equal Slurm settings: the runs of a sweep."""
    answers: dict[tuple[str, Version | None], ClusterFacts] = {}

    def facts(spec: AnySpec, release: Version | None) -> ClusterFacts:
        key = (spec.slurm.model_dump_json(), release)
        if key not in answers:
            answers[key] = target.facts(spec, release)
        return answers[key]

    return replace(target, facts=facts)


@dataclass(frozen=True, slots=True)
class JobPlan:
    """A job with every choice made."""

    user_spec: AnySpec  # the job as the user wrote it
    resolution: MachineChoices  # every choice, with its reason
    spec: AnySpec  # the job with these choices, as in the run directory
    where: Where  # the back end, with its reason
    placement: Placement  # the places of all ranks
    device: Device  # the ranks' device, with its memory if known
    record: RunPlan  # content of plan.json
    facts: ClusterFacts  # facts from Slurm; empty on emulated nodes
    template: ScriptTemplate | None = None  # template of the job script, if not the shipped one
    measured: LinkRates | None = None  # rates between nodes of the cluster, which determine the order of the hosts
    avoided: tuple[BadNode, ...] = ()  # nodes that we, not the user, exclude
    member: SweepMember | None = None  # its place in a sweep; None without a sweep
    resumes: RunDirectory | None = None  # the run to resume; None for a new one
    depends: Dependencies = NONE  # its dependencies in Slurm's queue

    @property
    def steps(self) -> int:
        """Optimizer steps in all; 0 if unknown."""
        return self.spec.train.steps if isinstance(self.spec, JobSpec) else 0


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingPlan(JobPlan):
    """The plan of a training by our own engine; ``shape``: the model's shape."""

    user_spec: JobSpec
    resolution: Resolution
    spec: JobSpec
    shape: ModelShape
    unpredicted: str = ""  # why nothing is expected of it


def compose(user_spec: JobSpec, where: Where, target: Target, slurm_version: Version | None = None,
            earlier: RunPlan | None = None, resumed: RunDirectory | None = None) -> TrainingPlan:
    """Make all choices and all checks that need neither transformers nor the data.

    Args:
        slurm_version: the release to write the job script for, in place of the detected one.
        earlier: plan of the resumed run: a pipeline with the same number of stages keeps its cut, whatever release made it.
        resumed: the resumed run.

    Raises:
        HpcMpError: the model is missing or cannot be cut, its ranks exceed the memory, state is offloaded to the place where it
            already is, a GPU is missing, the run in ``checkpoint.resume`` has no usable state, or an environment profile does
            not exist.
    """
    shape = read_shape(user_spec)
    check_job(user_spec, shape)
    check_pretrained(user_spec)
    if user_spec.checkpoint.resume is not None:
        check_resumable(f"checkpoint.resume = {user_spec.checkpoint.resume}",
                        counters_of(origin_of(Path(user_spec.checkpoint.resume))),
                        {"model": adapter_fields(shape.adapters), "optimizer": user_spec.train.optimizer}, user_spec.train.steps)
    facts = target.facts(user_spec, slurm_version)
    bad = bad_nodes(ledger(facts.cluster), run=resumed.path if resumed else None) if facts.cluster is not None else {}
    measured = noted(facts.cluster)
    gpus = target.gpus(user_spec, facts)
    machine, unpredicted = known_machine(user_spec, gpus.device, facts)
    opened = open_layout(user_spec, shape, machine, earlier) if machine is not None else ()
    job = resolved(user_spec, opened)
    layers = _layers(job, shape, earlier)
    draft = layout_of(resolved(job, cut(layers)), shape)
    traffic = traffic_of(draft, shape)
    step = None if machine is None else lambda order: estimate(replace(draft, order=order), shape, machine).seconds
    order = choose_rank_order(draft, traffic, measured, step)
    resolution = _resolution(job, shape, machine_choices(user_spec, target, facts, bad, gpus, measured), measured, layers,
                             draft, order, resumed)
    resolution = replace(resolution, opened=opened, exclude=fitting(user_spec, resolution, target, facts, bad))
    spec = resolved(user_spec, resolution.keys)
    layout = layout_of(spec, shape)
    placement = place(layout.degrees, resolution.order.value, layout.ranks_per_node, layout.rank_map)
    held = state_bytes(layout, shape)
    state = tuple(held[rank.pp, rank.tp] for rank in placement.ranks)
    check_offload(layout, gpus.device)
    on_cpu = gpus.device.kind == "cpu"  # its memory is the host's
    computes_on = with_node_memory(gpus.device, spec, facts, [rank.node for rank in placement.ranks])
    check_memory([share.total + on_cpu * share.host for share in state], computes_on)
    expected = None
    if machine is not None:  # emulated nodes are one machine
        expected = expect(replace(layout, ranks_per_node=layout.ranks) if gpus.device.pools else layout, shape, machine)
        check_room(spec, shape, machine, expected)
    record = RunPlan(layers.value, traffic, state, order.seconds, tuple(key for key in resolution.keys if key.why),
                     chunk_counts(layout), where.place, expected)
    return TrainingPlan(
        user_spec=user_spec, resolution=resolution, spec=spec, where=where, shape=shape, placement=placement,
        device=computes_on, record=record, facts=facts, measured=measured, unpredicted=unpredicted,
        avoided=avoided(user_spec, resolution.exclude, bad), resumes=resumed)


def machine_choices(user_spec: AnySpec, target: Target, facts: ClusterFacts, bad: Mapping[str, BadNode], gpus: GpuRequest,
                    measured: LinkRates | None) -> MachineChoices:
    """Make the choices that depend only on the machine or the cluster. Raises HpcMpError if a profile does not exist."""
    profile = choose_profile(user_spec, measured.platform if measured else None)
    return MachineChoices(
        ResolvedKey("job.device", gpus.device.kind, gpus.device.why), gpus.form, gpus.type, exclude=avoid(user_spec, facts, bad),
        profile=profile if target.in_script else ResolvedKey(profile.key, profile.value))


def fitting(user_spec: Spec, choices: MachineChoices, target: Target, facts: ClusterFacts,
            bad: Mapping[str, BadNode]) -> ResolvedKey[str | None]:
    """Return the nodes to exclude: those of ``choices``, or none of ours if the job could not start without them. Raises
    HpcMpError if the job could not start at all."""
    spec = resolved(user_spec, choices.keys)
    try:
        target.fits(spec, facts)
    except HpcMpError:
        if not avoided(user_spec, choices.exclude, bad):
            raise
        spared = spare(avoided(user_spec, choices.exclude, bad))
        target.fits(resolved(user_spec, replace(choices, exclude=spared).keys), facts)
        return spared
    return choices.exclude


def without_avoiding(plan: JobPlan) -> JobPlan:
    """Return the plan without our exclusions, for a job that cannot start on the other nodes."""
    resolution = replace(plan.resolution, exclude=spare(plan.avoided)) if plan.avoided else plan.resolution
    record = replace(plan.record, choices=tuple(key for key in resolution.keys if key.why))
    spec: AnySpec = resolved(cast("Any", plan.user_spec), resolution.keys)  # of the same kind
    return replace(plan, resolution=resolution, spec=spec, record=record, avoided=())


def newest_run(spec: AnySpec) -> RunDirectory | None:
    """Return the newest run of this job's name; None if no run exists."""
    try:
        return find_run(Path(spec.job.directory) / spec.job.name)
    except HpcMpError:
        return None


def stages_of(spec: JobSpec, shape: ModelShape) -> StageCut:
    """Return the stages of a job, with the reason. With a measured profile and no ``memory_weight``, the planner weighs. Raises
    HpcMpError if the profile is missing, or is a profile of something else."""
    if spec.parallel.partition == "profile" and spec.parallel.memory_weight is None:
        return measured_cut(undivided(spec), shape, profile_of(spec, shape))
    return stage_cut(spec, shape)


def _layers(spec: JobSpec, shape: ModelShape, earlier: RunPlan | None) -> ResolvedKey[tuple[int, ...]]:
    auto, expected = spec.parallel.partition == "auto", (spec.stages, shape.layers)
    if auto and earlier is not None and (len(earlier.layers), sum(earlier.layers)) == expected:
        return ResolvedKey("parallel.partition", earlier.layers, "as in the run that is resumed")
    chosen = stages_of(spec, shape)
    return ResolvedKey("parallel.partition", chosen.layers, chosen.why)


def _resolution(
    spec: JobSpec, shape: ModelShape, machine: MachineChoices, measured: LinkRates | None, layers: ResolvedKey[tuple[int, ...]],
    layout: Layout, order: RankOrder, resumed: RunDirectory | None,
) -> Resolution:
    slow = expected_slow_links(spec.parallel.rank_map, spec.job.nodes, measured)
    family, cut = family_of(shape), layout.tensor_cut()
    heads = head_counts(family, shape, cut)
    cuts = [f"{max(heads)} to {min(heads)} attention heads per tensor rank"] if max(heads) > min(heads) else []
    cuts += [f"on every tensor rank: {unsplit}"] if (unsplit := left_whole(family, shape, cut)) else []
    return Resolution(
        machine.device, machine.gpu_request, machine.gpu_type, machine.exclude, machine.profile,
        layers=layers, tensor_modules=ResolvedKey("parallel.tensor_modules", spec.parallel.tensor_modules, "; ".join(cuts)),
        reduce=reduce_choice(layout, shape, spec.parallel.reduce),
        order=ResolvedKey("parallel.order", order.letters, "; ".join(filter(None, (order.why, slow)))),
        schedule=rate_schedule(spec, resumed or (None if spec.checkpoint.resume is None
                                                 else find_run(Path(spec.checkpoint.resume)))))


def origin_of(path: Path) -> Path:
    """Return the newest checkpoint of the run in ``checkpoint.resume``. Raises HpcMpError if it has none."""
    value = f"checkpoint.resume = {path}"
    try:
        run = find_run(path)
    except HpcMpError as error:
        raise HpcMpError(value, error.rule, error.remedy) from None
    saved = complete_steps(run.checkpoints)
    if not saved:
        raise HpcMpError(value, "is a run without a checkpoint", "name a run that has saved")
    return saved[-1]
