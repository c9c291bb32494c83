"""Checks of the paths between NVIDIA GPUs, and from GPUs to the network."""

from collections.abc import Iterator

from hpc_mp.base.findings import Severity
from hpc_mp.base.text import counted, duration
from hpc_mp.catalogue import catalogue
from hpc_mp.cluster.node import gpu_links
from hpc_mp.cluster.node.counters import Changes, read_changes
from hpc_mp.cluster.node.gpu_driver import SmiAnswer, ask_smi
from hpc_mp.cluster.node.nvidia_smi import GpuReport
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well
from hpc_mp.doctor.checks.per_gpu import NotApplicable, checks_of_gpus, seen, usual_of

MOST_ERRORS = 5  # on one link between two readings; the threshold of imbue's cluster-health
_NEAR = ("PIX", "PXB", "PHB", "NODE", "SYS")  # paths from GPU to NIC, the nearest first
_DIRECT = ("PIX", "PXB")  # paths that bypass the processor
# Health of a GPU in the fabric: field to (severity of any other value, healthy values). R565 to R575 have no summary.
HEALTH: dict[str, tuple[Severity, tuple[str, ...]]] = {
    "summary": ("warning", ("Healthy",)), "bandwidth": ("error", ("Full",)), "route_unhealthy": ("error", ("False", "No")),
    "route_recovery_in_progress": ("warning", ("False", "No")), "access_timeout_recovery": ("warning", ("False", "No")),
    "incorrect_configuration": ("error", ("None", "False", "No")),
}
_NO_CLUSTER = "00000000-0000-0000-0000-000000000000"


def inactive(links: gpu_links.NvLinks) -> Iterator[Judgement]:
    for gpu, message in links.errors.items():
        yield Judgement("error", f"the driver does not tell of its NVLinks: {message}", f"GPU {gpu}")
    by_gpu = {gpu: rates for gpu, rates in links.rates.items() if rates and gpu not in links.apart}
    down = {gpu: [link for link, rate in rates.items() if rate is None] for gpu, rates in by_gpu.items()}
    if all(len(down[gpu]) == len(rates) for gpu, rates in by_gpu.items()) and not any(_expected(links, gpu) for gpu in by_gpu):
        return  # a PCIe card without a bridge
    for gpu, dark in down.items():
        if dark:  # a card without a bridge may be beside two that have a bridge
            grave: Severity = "error" if len(dark) < len(by_gpu[gpu]) or _expected(links, gpu) else "warning"
            yield Judgement(grave, f"{counted(len(dark), 'NVLink')} inactive: {', '.join(map(str, dark))}", f"GPU {gpu}")
    if by_gpu and not any(down.values()) and not links.errors:
        yield Judgement("ok", f"all NVLinks of {counted(len(by_gpu), 'GPU')} are active")


def rates(links: gpu_links.NvLinks) -> Iterator[Judgement]:
    """Check number and speed of active NVLinks against the model, or against most GPUs if the model is unknown."""
    active = {gpu: [rate for rate in by_link.values() if rate is not None] for gpu, by_link in links.rates.items()
              if gpu not in links.apart and gpu not in links.errors}
    shapes = {gpu: (len(fast), min(fast, default=0.0)) for gpu, fast in active.items() if fast or _expected(links, gpu)}
    usual = usual_of([_shape(shape) for shape in shapes.values()])
    bad = False
    for gpu, shape in shapes.items():
        model = catalogue().gpu(links.names[gpu])
        expected = (model.board_links, model.nvlink_gbs) if model and model.board_links and model.nvlink_gbs else None
        if expected:
            short = shape[0] < expected[0] or shape[1] < 0.99 * expected[1]
        else:
            short = usual is not None and _shape(shape) != usual
        if short:
            bad = True
            should = f"a {links.names[gpu]} has {_shape(expected)}" if expected else f"most others have {usual}"
            yield Judgement("error", f"{_shape(shape)}; {should}", f"GPU {gpu}")
    if shapes and not bad:
        yield Judgement("ok", f"{counted(len(shapes), 'GPU')} with {usual or 'NVLinks as their models have'}")


def errors(changes: Changes) -> Iterator[Judgement]:
    grown, within = changes.of(gpu_links.COUNTERS), f"within {duration(changes.seconds)}"
    bad = (Judgement("error" if count >= MOST_ERRORS else "warning", f"link {name.partition(' link ')[2]}: {count} more {within}",
                     name.partition(" link ")[0]) for name, count in grown.items() if count)
    yield from or_well(bad, f"no error counter of an NVLink grew {within}" if grown else "")


def fabric_state(gpu: GpuReport) -> Judgement | None:
    state, status = gpu.says("fabric/state"), gpu.says("fabric/status")
    if state is None and "fabric/state" in gpu.values and _in_rack(gpu):
        return Judgement("error", "fabric state N/A: no NVLink beyond this tray")
    if state is None:
        raise NotApplicable
    if state != "Completed" or status not in ("Success", None):
        return Judgement("error",
                         f"fabric state {state}, status {status or 'untold'}: CUDA fails with error 802 until it is completed")
    ill = [(severity, f"{path.replace('_', ' ')} {value}") for path, (severity, well) in HEALTH.items()
           if (value := gpu.says(f"fabric/health/{path}")) is not None and value not in well]
    grave = gpu.says("fabric/health/summary") == "Unhealthy" or any(severity == "error" for severity, _ in ill)
    return Judgement("error" if grave else "warning", f"fabric health: {', '.join(text for _, text in ill)}") if ill else None


def manager(fabric: gpu_links.NvswitchFabric) -> Iterator[Judgement]:
    if not fabric.nvswitches:
        return  # no NVSwitches here, or managed by the host
    evidence = counted(fabric.nvswitches, "NVSwitch", "NVSwitches")
    if fabric.manager == "active":
        yield Judgement("ok", f"nvidia-fabricmanager runs, for {evidence}")
    elif fabric.manager.startswith("unknown"):
        yield Judgement("unknown", f"{evidence}; {fabric.manager}")
    else:
        yield Judgement("error", f"{evidence} and nvidia-fabricmanager is {fabric.manager}")


def imex(facts: gpu_links.Imex) -> Iterator[Judgement]:
    if facts.domain != "UP":
        yield Judgement("error", f"IMEX domain is {facts.domain}: no memory of other nodes over NVLink")
    for address, state in facts.nodes:
        if state != "READY":
            yield Judgement("error", f"IMEX node is {state}", address)
    if facts.unconnected:
        first, second, letter = facts.unconnected[0]
        yield Judgement("error", f"not connected to node {second} ({letter}); "
                        f"{len(facts.unconnected)} such pairs; V is a version that differs", f"IMEX node {first}")
    if not facts.channels:
        yield Judgement("error", "no /dev/nvidia-caps-imex-channels/channel*: programs cannot use IMEX",
                        fix="load the driver with NVreg_CreateImexChannel0=1, or let Slurm's switch/nvidia_imex make one per job")
    if facts.domain == "UP" and not facts.unconnected and facts.channels and all(state == "READY" for _, state in facts.nodes):
        yield Judgement("ok", f"IMEX domain of {counted(len(facts.nodes), 'node')} is up and fully connected")


def clique(answer: SmiAnswer) -> Iterator[Judgement]:
    joined = [gpu for gpu in seen(answer).gpus if gpu.says("fabric/state") == "Completed"]  # gpu-fabric reports all others
    racks = [gpu for gpu in joined if _in_rack(gpu)]
    lost = [gpu for gpu in racks if gpu.says("fabric/clusterUuid") in (None, _NO_CLUSTER)]
    gpus = [gpu for gpu in joined if gpu.says("fabric/clusterUuid")]
    groups = [f"{gpu.says('fabric/clusterUuid')}.{gpu.says('fabric/cliqueId')}" for gpu in gpus]
    if lost:
        yield Judgement("error", f"cluster UUID {lost[0].says('fabric/clusterUuid') or 'N/A'} on "
                        f"{', '.join(map(str, lost))}: this tray belongs to no NVLink domain")
    elif len(set(groups)) > 1:
        odd = "; ".join(f"{gpu}: {group}" for gpu, group in zip(gpus, groups, strict=True) if group != usual_of(groups))
        yield Judgement("error", f"GPUs of one node are in different cliques: {odd}")
    elif racks:
        yield Judgement("ok", f"all GPUs are in clique {groups[0]}")


def peers(topology: gpu_links.GpuTopology) -> Iterator[Judgement]:
    pairs = {pair: state for pair, state in topology.paths.items() if pair[0] != pair[1] and pair[1].startswith("GPU")}
    bad = {pair: state for pair, state in pairs.items() if state != "OK"}
    if pairs and len(bad) == len(pairs):
        states = ", ".join(sorted(set(bad.values())))
        yield Judgement("error", f"no GPU reaches another's memory over NVLink ({states})")
    elif bad:
        shown = ", ".join(f"{first}→{second} {state}" for (first, second), state in list(bad.items())[:6])
        yield Judgement("error", f"{len(bad)} of {len(pairs)} paths between GPUs: {shown}", _commonest(bad))
    elif pairs:
        yield Judgement("ok", f"all {len(pairs)} paths between GPUs are open over NVLink")


def joined(topology: gpu_links.GpuTopology) -> Iterator[Judgement]:
    if len(topology.gpus) < 2:
        return
    between = {(first, second): topology.paths.get((first, second), "")
               for place, first in enumerate(topology.gpus) for second in topology.gpus[place + 1:]}
    usual = usual_of(list(between.values())) or ""
    odd = {pair: way for pair, way in between.items() if way != usual and usual.startswith("NV")}
    strays = {sum(gpu in pair for pair in odd) for gpu in topology.gpus}
    partners = {gpu: sum(gpu in pair and way.startswith("NV") for pair, way in between.items()) for gpu in topology.gpus}
    alone = [gpu for gpu, count in partners.items() if not count]
    meshed = all(count > 1 for count in partners.values() if count)  # bridges join pairs, and the job may see one half of a pair
    if odd and len(strays) > 1 and topology.alike:  # an equal number on each GPU is the wiring of the board
        shown = ", ".join(f"{first}–{second} {way}" for (first, second), way in list(odd.items())[:6])
        yield Judgement("error", f"most pairs are joined by {usual}, but {shown}", _commonest(odd))
    elif len(alone) == 1 and meshed:
        yield Judgement("error", f"{alone[0]} has no NVLink to another GPU; each of the others has it to several")
    else:
        kinds = ", ".join(sorted(set(between.values())))
        yield Judgement("ok", f"{counted(len(topology.gpus), 'GPU')} joined by {kinds}")


def nearest_nic(topology: gpu_links.GpuTopology) -> Iterator[Judgement]:
    if not topology.nics:
        return
    best = {gpu: min((topology.paths.get((gpu, nic), "SYS") for nic in topology.nics),
                     key=lambda way: _NEAR.index(way) if way in _NEAR else len(_NEAR)) for gpu in topology.gpus}
    direct = [gpu for gpu, way in best.items() if way in _DIRECT]
    kinds = ", ".join(sorted(set(best.values())))
    if not direct:
        yield Judgement("ok", f"nearest NIC at {kinds}: no PCIe switch that a GPU and a NIC share is shown here; "
                        "NCCL_TOPO_FILE tells NCCL of those that are hidden")
    elif len(direct) == len(best):
        yield Judgement("ok", f"every GPU has a NIC on its own PCIe switch ({kinds})")
    for gpu, way in best.items():
        if direct and way not in _DIRECT:
            yield Judgement("warning",
                            f"nearest NIC at {way}; {counted(len(direct), 'other GPU')} have one on their own PCIe switch", gpu)


def _in_rack(gpu: GpuReport) -> bool:
    model = catalogue().gpu(gpu.name)
    return bool(model and model.rack) and gpu.says("mig_mode/current_mig") != "Enabled"


def _expected(links: gpu_links.NvLinks, gpu: int) -> bool:
    model = catalogue().gpu(links.names.get(gpu, ""))
    return bool(model and model.board_links)


def _shape(shape: tuple[int, float]) -> str:
    return f"{counted(shape[0], 'link')} of {shape[1]:g} GB/s"  # the digits that nvidia-smi prints


def _commonest(pairs: dict[tuple[str, str], str]) -> str:
    """Return the GPU that all bad pairs have in common, "" if there is not exactly one."""
    common = set.intersection(*(set(pair) for pair in pairs))
    return common.pop() if len(common) == 1 else ""


CHECKS = (
    *checks_of(gpu_links.read_links, {"gpu-nvlink-down": inactive, "gpu-nvlink-rate": rates}),
    *checks_of(read_changes, {"gpu-nvlink-errors": errors}),
    *checks_of_gpus({"gpu-fabric": fabric_state}),
    *checks_of(gpu_links.read_fabric, {"gpu-fabric-manager": manager}),
    *checks_of(gpu_links.read_imex, {"gpu-imex": imex}),
    *checks_of(ask_smi, {"gpu-clique": clique}),
    *checks_of(gpu_links.read_peers, {"gpu-p2p": peers}),
    *checks_of(gpu_links.read_topology, {"gpu-topology": joined, "gpu-nic": nearest_nic}),
)
