"""CC4xx: settings of cyclecloud-slurm: partitions, accounting, health, memory."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.context import Case
from hpc_mp.clouds.azure.partitions import Partition, partitions
from hpc_mp.clouds.azure.project import reference
from hpc_mp.clouds.azure.resolve import ResolvedCluster, ResolvedNode, ResolvedSetting
from hpc_mp.clouds.azure.vocabulary import SLURM_SETTINGS, meant

_RESERVED = ("default", "all")
_LEAST, _MOST = 1, 20  # per cent of memory held back
_ROLES = ("scheduler", "login", "execute")
_SPECS = ("default", *_ROLES)
_PAST_SPECS = {"master": ("1.", "2.0.", "2.1."), "pyxis": ("4.0.0", "4.0.1", "4.0.2")}  # and the releases that had them
_PROJECT = "cyclecloud/slurm:"
_UIDS = ("slurm.user.uid", "slurm.user.gid", "munge.user.uid", "munge.user.gid")
_DEVICES = re.compile(r"(?:nvidia|renderD)\[([^\]]+)\]|(?:nvidia|renderD)\d+")
_GRES = re.compile(r"(?i)gres=gpu(?::[a-z][\w.\-]*)?:(\d{1,4})")


def _many_defaults(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        found = [each for each in partitions(cluster, case.offer) if each.node.is_true("slurm.default_partition")]
        for each in found[1:]:
            line = each.node.configuration["slurm.default_partition"].line
            yield Hit(line, each.name, f"{found[0].name}, line {found[0].node.configuration['slurm.default_partition'].line}")


def _no_default(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        found = partitions(cluster, case.offer)
        given = [each.node.configured("slurm.default_partition") for each in found]
        if len(found) > 1 and not any(each and (each.is_true or not each.known) for each in given):
            yield Hit(cluster.line, ", ".join(each.name for each in found))


def _same_partition(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        first: dict[str, Partition] = {}
        for each in partitions(cluster, case.offer):
            other = first.setdefault(each.name.casefold(), each)
            if other is not each and not (each.is_dynamic and other.is_dynamic):
                yield Hit(each.line, each.name, f"{other.node.name} and {each.node.name}")


def _reserved(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        if each.name.casefold() in _RESERVED or not re.fullmatch(r"[\w.\-]+", each.name, re.ASCII):
            yield Hit(each.line, each.name)


def _accounting(cluster: ResolvedCluster) -> ResolvedSetting | None:
    found = [each for node in cluster.real if (each := node.configured("slurm.accounting.enabled"))]
    return next((each for each in found if not each.is_false), found[0] if found else None)


def _no_accounting(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        found = _accounting(cluster)
        if partitions(cluster, case.offer) and (found is None or found.is_false):
            yield Hit(found.line if found else cluster.line, f"off{found.via}" if found else "not set")


def _accounting_needs(case: Case) -> Iterable[Hit]:
    for node in case.real:
        found = node.configured("slurm.accounting.enabled")
        role = node.configured("slurm.role")
        if found and found.is_true and (role is None or role.text.casefold() == "scheduler"):
            missing = [key for key in ("url", "user", "password") if not node.configured(f"slurm.accounting.{key}")]
            if missing:
                yield Hit(found.line, ", ".join(f"slurm.accounting.{key}" for key in missing))


def _no_health(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        found = each.node.get("EnableNodeHealthChecks")
        if any(size.gpus for size in each.sizes) and (found is None or found.is_false):
            yield Hit(found.line if found else each.node.line, each.name, f"false{found.via}" if found else "not set")


def _dampen(case: Case) -> Iterator[ResolvedSetting]:
    found = {each.line: each for node in case.nodes if (each := node.configured("slurm.dampen_memory")) and each.known}
    return iter(found.values())


def _dampen_form(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, each.raw) for each in _dampen(case) if each.number is None or not 0 <= each.number < 100)


def _dampen_amount(case: Case) -> Iterable[Hit]:
    for each in _dampen(case):
        if each.number is not None and 0 <= each.number < 100 and not _LEAST <= each.number <= _MOST:
            what = "slurmd then reports less memory than slurm.conf says, and the node is drained" if not each.number else \
                "that much of every node's memory is never used"
            yield Hit(each.line, str(each.number), what)


def _config(case: Case) -> Iterator[ResolvedSetting]:
    """slurm.additional.config wherever it is set, once a line."""
    found = {each.line: each for node in case.nodes if (each := node.configured("slurm.additional.config")) and each.written}
    return iter(found.values())


def _in_config(pattern: str) -> Callable[[Case], Iterable[Hit]]:
    """Where a line of slurm.conf that is added says this."""
    def find(case: Case) -> Iterable[Hit]:
        for each in _config(case):
            for found in re.finditer(pattern, each.written, re.IGNORECASE | re.MULTILINE):
                yield Hit(each.line_at(found.start()), found[0].strip())
    return find


def _no_capacity(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        found = each.node.get("MaxCount")
        if found and found.number == 0:
            yield Hit(found.line, each.name, found.via)


def _misspelt(case: Case) -> Iterable[Hit]:
    for node in case.nodes:
        for each in node.section.sections:
            for attribute in each.attributes if each.kind.casefold() == "configuration" else ():
                name = f"{each.name}.{attribute.name}" if each.name else attribute.name
                if name.casefold().startswith("slurm") and (near := meant(name, SLURM_SETTINGS, 0.9)):
                    yield Hit(attribute.line, name, near)


def _no_autoscale(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, each.name) for each in case.partitions if each.node.configured("slurm.autoscale") is None)


def _imex(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        found = each.node.configured("slurm.imex.enabled")
        blocks = [bool(size.nvlink_block) for size in each.sizes]
        if found and blocks and found.is_true and not any(blocks):
            yield Hit(found.line, "on", "no NVLink between machines of this size, and its prolog fails for want of a device")
        if found and all(blocks) and blocks and found.is_false:
            yield Hit(found.line, "off", "machines of one rack then talk through InfiniBand in place of NVLink")


def _uids(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        for name in _UIDS:
            found = [each for node in cluster.real if (each := node.configured(name)) and each.known]
            for each in found:
                if each.value != found[0].value:
                    yield Hit(each.line, f"{name} = {each.raw}", f"{found[0].raw}, line {found[0].line}")


def _gpu_count(text: str) -> int | None:
    """How many GPUs a list of devices or a GRES names."""
    if found := _GRES.search(text):
        return int(found[1])
    if not (found := _DEVICES.search(text)):
        return None
    total = 0
    for part in (found[1] or "0").split(","):
        ends = part.strip().split("-")
        if not all(end.isdecimal() and len(end) < 5 for end in ends) or len(ends) > 2:
            return None
        total += int(ends[-1]) - int(ends[0]) + 1
    return total


def _of_gpus(node: ResolvedNode) -> Iterator[ResolvedSetting]:
    for name in ("slurm.gpu_device_config", "slurm.dynamic_config"):
        if (found := node.configured(name)) and found.written:
            yield found


def _gres(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        for found in _of_gpus(each.node):
            count = _gpu_count(found.written)
            for size in each.sizes[:1]:
                if count is not None and count != size.gpus:
                    yield Hit(found.line, str(count), f"{size.name} has {size.gpus}")


def _gres_of_config(case: Case) -> Iterable[Hit]:
    sizes = {each.node.name.casefold(): each.sizes[0] for each in case.partitions if len(each.sizes) == 1}
    for each in _config(case):
        for found_line in re.finditer(r".+", each.written):
            line = found_line[0]
            named = re.match(r"(?i)\s*nodename=\S*?([a-z][\w]*)-\[?\d", line)
            size = sizes.get(named[1].casefold()) if named else None
            found = _GRES.search(line)
            if size and found and int(found[1]) != size.gpus:
                yield Hit(each.line_at(found_line.start()), found[1], f"{size.name} has {size.gpus}")


def _devices(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        found = each.node.configured("slurm.gpu_device_config")
        for size in each.sizes[:1]:
            other = {"amd": "nvidia", "nvidia": "renderd"}.get(size.gpu_vendor, " ")
            if found and other in found.written.casefold():
                right = "/dev/dri/renderD[128,136,…]" if size.gpu_vendor == "amd" else f"/dev/nvidia[0-{size.gpus - 1}]"
                yield Hit(found.line, found.written, f"{size.name} has {right}")


def _role(case: Case) -> Iterable[Hit]:
    found = {each.line: each for node in case.nodes if (each := node.configured("slurm.role")) and each.known}
    return (Hit(each.line, each.raw, f"{meant(each.written, _ROLES, 0.6) or 'scheduler, login or execute'}")
            for each in found.values() if each.text.casefold() not in _ROLES)


def _slurm_spec(case: Case) -> Iterable[Hit]:
    for section in case.sections:
        found = reference(section) if section.kind.casefold() == "cluster-init" else None
        if not found or not section.name.casefold().startswith(_PROJECT):
            continue
        past = found.version.startswith(_PAST_SPECS.get(found.spec.casefold(), ()))
        if found.spec.casefold() not in _SPECS and not past:
            yield Hit(found.line, found.spec, meant(found.spec, _SPECS, 0.6) or "default, scheduler, login or execute")


def _no_execute(case: Case) -> Iterable[Hit]:
    """Of clusters in which Azure's project brings Slurm; in others images do, or somebody's own project."""
    for cluster in case.clusters:
        ran = {node.name: {name.removeprefix(_PROJECT).split(":")[0] for kind, name in node.parts
                           if kind == "cluster-init" and name.startswith(_PROJECT)} for node in cluster.real}
        if any(specs.intersection(_ROLES) for specs in ran.values()):
            yield from (Hit(each.node.line, each.name) for each in partitions(cluster, case.offer)
                        if "execute" not in ran[each.node.name])


RULES: tuple[Rule[Case], ...] = (
    Rule("CC401", "error", _many_defaults,
         "{it} is a second default partition ({advice} is the first): where a job without --partition goes is an accident.",
         "Set slurm.default_partition = true in one node array only."),
    Rule("CC402", "warning", _no_default, "None of the partitions {it} is the default: every job without --partition is refused.",
         "Set slurm.default_partition = true in one of them."),
    Rule("CC403", "error", _same_partition,
         "The partition {it} belongs to two node arrays ({advice}): cyclecloud-slurm leaves both out.",
         "Name each its own; only arrays with slurm.dynamic_feature may share a partition."),
    Rule("CC404", "error", _reserved,
         "\"{it}\" is no name of a partition: slurm.conf gives it another meaning, or cannot be read.",
         "Use letters, digits, - and _; not DEFAULT or ALL."),
    Rule("CC405", "info", _no_accounting, "Accounting is {it}: there is no sacct, no fair share and no limit for anybody.",
         "Set slurm.accounting.enabled with a database's url, user and password; hpc-mp works without."),
    Rule("CC406", "error", _accounting_needs,
         "Accounting is on, and {it} is missing: slurmdbd does not start, and slurmctld waits for it.", "Set what is missing."),
    Rule("CC407", "warning", _no_health,
         "EnableNodeHealthChecks of {it} is {advice}: a machine with a broken GPU or port takes jobs, and takes them down.",
         "Set EnableNodeHealthChecks = true."),
    Rule("CC408", "error", _dampen_form, "slurm.dampen_memory = {it} is no whole number of per cent: azslurm scale fails on it.",
         "Write 5 for 5 %."),
    Rule("CC409", "warning", _dampen_amount, "slurm.dampen_memory = {it}: {advice}.", "Leave it out (5 %), or set 1 to 20."),
    Rule("CC410", "error", _in_config(r"^[ \t]*TopologyPlugin\s*=\s*topology/block\b"),
         "{it} before there is a topology.conf keeps slurmctld from starting, and autoscaling never writes one.",
         "Leave it out; switch it on by a script once the nodes exist, for partitions of a fixed size."),
    Rule("CC411", "warning", _in_config(r"^[ \t]*HealthCheckProgram\s*=.*"),
         "\"{it}\" takes the place of healthagent's, which then no longer drains and resumes nodes.",
         "Leave HealthCheckProgram to healthagent; add to its checks, or call it from yours."),
    Rule("CC412", "warning", _no_capacity,
         "MaxCount of {it} is 0{advice}: the partition has no nodes, and jobs in it are refused.",
         "Raise MaxCount, or set slurm.autoscale = false to have no such partition."),
    Rule("CC413", "warning", _misspelt, "{it} is no setting of cyclecloud-slurm, and is ignored without a word.",
         "Write {advice}."),
    Rule("CC414", "warning", _no_autoscale,
         "{it} does not set slurm.autoscale: its nodes may be left out of slurm.conf, or never start by themselves.",
         "Set slurm.autoscale = true (or false for nodes that you start by hand)."),
    Rule("CC415", "warning", _imex, "slurm.imex.enabled is {it}: {advice}.", "Leave it out: it is on where the size needs it."),
    Rule("CC416", "error", _uids,
         "{it} differs from another node's ({advice}): slurmd and slurmctld refuse each other's messages.",
         "Set it once, in [[node defaults]]."),
    Rule("CC417", "error", _gres,
         "{it} GPUs are written down, and {advice}: slurmd finds another number and the node is drained.",
         "Correct the count, or leave the setting out: it is derived from the size."),
    Rule("CC418", "error", _gres_of_config,
         "A NodeName line asks for {it} GPUs, and {advice}: slurmd finds another number and the node is drained.",
         "Correct the count, or leave the line out: azslurm writes it."),
    Rule("CC419", "error", _devices, "{it} are devices of another maker: {advice}.",
         "Correct slurm.gpu_device_config, or leave it out."),
    Rule("CC420", "warning", _in_config(r"^[ \t]*TaskPlugin\s*=(?!.*cgroup).*"),
         "\"{it}\" takes cgroups away: a job is no longer kept to its GPUs and memory.",
         "Leave TaskPlugin as it is, or name task/cgroup in it."),
    Rule("CC421", "warning", _in_config(r"^[ \t]*(SuspendTime|ResumeTimeout)\s*=\s*(-1|\d{1,2})[ \t]*(?:#.*)?$"),
         "\"{it}\": machines take minutes to start, so they are given up before they are there, or paid for for ever.",
         "Keep SuspendTime = 300 and ResumeTimeout = 1800 or more."),
    Rule("CC422", "error", _role, "slurm.role = {it} is no role: the node is neither scheduler nor login nor execute node.",
         "Write {advice}."),
    Rule("CC423", "warning", _no_execute,
         "The nodes of {it} do not run cyclecloud/slurm:execute: they get no slurmd, and jobs wait for them until ResumeTimeout.",
         "Add [[[cluster-init cyclecloud/slurm:execute]]] to the node array or to what it extends."),
    Rule("CC424", "error", _slurm_spec, "cyclecloud/slurm has no spec {it}: the node stops while it starts.", "Write {advice}."),
)
