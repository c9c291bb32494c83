"""Rules on slurm.conf, gres.conf, cgroup.conf and topology.conf as files. Most of these faults keep Slurm from starting."""

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence

from hpc_mp.base.findings import Hit, Rule, Severity
from hpc_mp.base.grouping import grouped
from hpc_mp.base.rule_table import rules_of
from hpc_mp.base.text import counted, did_you_mean, several
from hpc_mp.cluster.slurm.conf_file import ConfigLine, conf_keys, conf_kinds, conf_table, fits
from hpc_mp.cluster.slurm.nodelist import expanded
from hpc_mp.cluster.slurm.query import parse_gres
from hpc_mp.cluster.slurm.records import Words
from hpc_mp.cluster.slurm.releases import exists
from hpc_mp.cluster.topology.model import listed
from hpc_mp.lint.slurm_conf.conf_files import ConfFiles, processors
from hpc_mp.lint.slurm_conf.config import number

_LINES = {kind.casefold(): kind for kind in ("NodeName", "PartitionName", "NodeSet", "DownNodes")}  # records with fields
_SEVERAL = ("frontendname", "poweraction", "slurmctldhost")  # other lines with several keys
_ADDRESSES = ("nodeaddr", "nodehostname", "bcastaddr", "port")  # fields with one value for each node of the line
_SHARED = ("mps", "shard")  # resources that share a device


def _hit(line: ConfigLine, subject: str, item: str = "", advice: str = "") -> Hit:
    return Hit(line.number, item, advice, str(line.file) if line.file else None, subject)


def _tables(files: ConfFiles) -> Iterator[tuple[ConfigLine, str, list[str]]]:
    """Yield each line with the table of its keys and its keys; a line of a node or similar record twice."""
    for line in files.lines:
        keys = [key for key, _ in line.pairs]
        yield line, "setting", keys[:1]
        if keys and (kind := _LINES.get(keys[0].casefold())):
            yield line, kind, keys[1:]
    for table, lines in (("gres", files.gres), ("cgroup", files.cgroup)):
        yield from ((line, table, [key for key, _ in line.pairs]) for line in lines or ())


def _unread(files: ConfFiles) -> Iterator[Hit]:
    for line, table, keys in _tables(files):
        alone = table in ("setting", "cgroup") and len(line.pairs) > 1 and keys[0].casefold() not in (*_LINES, *_SEVERAL)
        if table in ("setting", "gres", "cgroup") and (rest := line.rest or ("=".join(line.pairs[1]) if alone else "")):
            yield _hit(line, rest[:80])


def _unknown_keys(files: ConfFiles) -> Iterator[Hit]:
    for line, table, keys in _tables(files):
        names = conf_keys(table)
        for key in keys:
            if key.casefold() not in names:
                yield _hit(line, key, "", did_you_mean(key, (name for name, _ in names.values())) or "leave it out")
            elif files.release and not exists(names[key.casefold()][1], files.release):
                yield _hit(line, key, "", "leave it out")


def _of_some_releases(files: ConfFiles) -> Iterator[Hit]:
    for line, table, keys in _tables(files) if files.release is None else ():
        names = conf_keys(table)
        yield from (_hit(line, key, _refusing(releases)) for key in keys if (releases := names.get(key.casefold(), ("", ""))[1]))
    for values, releases in conf_table("values").items():
        pairs = [pair.split("=") for pair in values.split()]
        lines = [line for line in files.lines for key, value in pairs if line.fields.get(key.casefold(), "").casefold() == value]
        if all(files.settings.get(key, "").casefold() == value for key, value in pairs) and not (
                files.release and exists(releases, files.release)):
            yield _hit(lines[-1], values, _refusing(releases))
    if files.whole and files.node_lines and not files.partition_lines and (files.release or (22, 5)) <= (22, 5):
        yield Hit(item="Slurm before 23.02", subject="no PartitionName")


def _values(files: ConfFiles) -> Iterator[Hit]:
    for line, table, keys in _tables(files):
        for key in keys:
            value = line.fields[key.casefold()]
            wrong = [kind for kind in conf_kinds(table).get(key.casefold(), ()) if not fits(value, kind)]
            yield from (_hit(line, f"{key}={value}", kind["rule"], kind["write"]) for kind in wrong[:1])


def _refusing(releases: str) -> str:
    since, _, until = releases.partition("-")
    return "Slurm " + " and ".join((*([f"before {since}"] if since else ()), *([f"from {until} on"] if until else ())))


def _twice(files: ConfFiles) -> Iterator[Hit]:
    definitions: set[tuple[str, str]] = set()
    for line, kind, names in (*((line, "node", nodes) for line, nodes, _ in files.node_lines),
                              *((line, "partition", (fields["PartitionName"],)) for line, fields in files.partition_lines)):
        again = [name for name, count in Counter(names).items() if count > 1 or (kind, name) in definitions]
        definitions |= {(kind, name) for name in names}
        if again:
            yield _hit(line, f"{kind} {listed(again)}")


def _nodes_from_nowhere(files: ConfFiles) -> Iterator[Hit]:
    names = {node for _, nodes, _ in files.node_lines for node in nodes}
    for line, fields in files.partition_lines if files.whole else ():
        lost = [node for node in expanded(fields["Nodes"]) if node not in names]
        if lost and not line.rest:
            yield _hit(line, f"{fields['PartitionName']}: {listed(lost)}")


def _processors(files: ConfFiles) -> Iterator[Hit]:
    for line, nodes, fields in files.node_lines:
        fitting, taken = processors(fields)
        if fields.get("CPUs", "").isdecimal() and int(fields["CPUs"]) not in fitting:
            yield _hit(line, f"{listed(nodes)}: CPUs={fields['CPUs']}", " or ".join(map(str, sorted(fitting))), str(taken))


def _addresses(files: ConfFiles) -> Iterator[Hit]:
    for line in files.lines:
        if line.fields.get("nodename", "").upper() == "DEFAULT":
            yield from (_hit(line, f"{key}={value}", "a NodeName=DEFAULT line may not have it")
                        for key, value in line.pairs if key.casefold() in _ADDRESSES[:3])
    for line, nodes, fields in files.node_lines:
        for key in (key for key in fields if key.casefold() in _ADDRESSES):
            if key == "NodeHostname" and files.release and files.release < (24, 11):
                continue  # depends on how Slurm was built
            value = re.sub(r"^(?!\[)(.*[-,].*)", r"[\1]", fields[key]) if key == "Port" else fields[key]
            if (count := len(expanded(value))) not in (1, len(nodes)):
                yield _hit(line, f"{listed(nodes)}: {key}={fields[key]}", f"{count} for {counted(len(nodes), 'node')}")


# --- gres.conf -------------------------------------------------------------------------------------------------------


def _undeclared(files: ConfFiles) -> Iterator[Hit]:
    types = files.settings.get("GresTypes", "").casefold().split(",")
    for line, nodes, fields in files.node_lines if files.whole else ():
        names = dict.fromkeys(name for name, _, _ in parse_gres(fields.get("Gres", "")))
        yield from (_hit(line, f"{listed(nodes)}: Gres={name}", name) for name in names if name.casefold() not in types)


def _typed(files: ConfFiles) -> Iterator[Hit]:
    for line, nodes, fields in files.node_lines:
        kinds = {(name, kind is None) for name, kind, _ in parse_gres(fields.get("Gres", ""))}
        if len(kinds) > len({name for name, _ in kinds}):
            yield _hit(line, f"{listed(nodes)}: Gres={fields['Gres']}")


def _devices(record: Words) -> tuple[str, ...]:
    return expanded(record.get("multiplefiles") or record.get("file") or record.get("files") or "")


def _count(record: Words) -> int | None:
    """Return the number of devices that a line of gres.conf defines; None if its count contains letters."""
    count = record.get("count", str(1 if "multiplefiles" in record else len(_devices(record)) or 1))
    return int(count) if count.isdecimal() else None


def _wrong(records: Sequence[Words], requested: int) -> str:
    """Return the fault in the lines of gres.conf for a node with ``requested`` of these devices in slurm.conf; "" without one.
    Source: _parse_gres_config and _foreach_gres_conf in src/interfaces/gres.c, and the output of slurmd 22.05.8 -G."""
    for record in records:
        files = 1 if "multiplefiles" in record else len(_devices(record))
        if "multiplefiles" in record and ({"file", "files"} & record.keys() or len(_devices(record)) < 2):
            return "MultipleFiles next to File, or with a single file"
        if files and record["name"].casefold() not in _SHARED and _count(record) not in (None, files):
            return f"Count={record['count']}, but {counted(files, 'file')}"
    if records[0]["name"].casefold() in _SHARED:
        return ""
    filed, typed = ([bool(_devices(record)) for record in records], ["type" in record for record in records])
    for key, flags in (("File", filed), ("Type", typed)):
        if any(flags) and not all(flags):
            return f"only some lines have {key}"
    if len(records) > 1 and not any(filed + typed):
        return f"{len(records)} lines for the same resource without File and Type"
    devices = Counter(device for record in records if "multiplefiles" not in record for device in _devices(record))
    twice = [device for device, count in devices.items() if count > 1]
    too_many = sum(filter(None, map(_count, records))) > requested > 0  # slurmd drops excess devices, duplicates included
    return f"{several(twice)} twice" if twice and not too_many else ""


def _records(files: ConfFiles, node: str) -> dict[str, list[tuple[ConfigLine, Words]]]:
    """Return the lines of gres.conf that apply to a node, by the name of the resource."""
    return grouped((record["name"].casefold(), (line, record)) for line, record, nodes in files.gres_lines
                   if "name" in record and (nodes is None or node in nodes))


def _gres_records(files: ConfFiles) -> Iterator[Hit]:
    hits: dict[tuple[int, str], Hit] = {}
    for _, nodes, fields in files.node_lines:
        requested = Counter[str]()
        for name, _, many in parse_gres(fields.get("Gres", "")):
            requested[name.casefold()] += many
        for name, rows in ((name, rows) for node in nodes for name, rows in _records(files, node).items()):
            if wrong := _wrong([record for _, record in rows], requested[name]):
                hits.setdefault((rows[-1][0].number, wrong), _hit(rows[-1][0], name, wrong))
    yield from hits.values()


def _cores(files: ConfFiles) -> Iterator[Hit]:
    hits: dict[int, Hit] = {}
    for _, nodes, fields in files.node_lines:
        cores = max(processors(fields)[0]) // (number(fields, "ThreadsPerCore") or 1)
        processor_count = any(number(fields, key) for key in ("CPUs", "Sockets", "SocketsPerBoard"))
        for line, record, place in files.gres_lines if processor_count else ():
            value = record.get("cores", record.get("cpus", ""))
            if (place is None or place & {*nodes}) and max(map(int, re.findall(r"\d+", value)), default=0) >= cores:
                hits.setdefault(line.number, _hit(line, f"cores {value}", f"{listed(nodes)} have the cores 0 to {cores - 1}"))
    yield from hits.values()


def _fewer_devices(files: ConfFiles) -> Iterator[Hit]:
    detected = any(record.get("autodetect", "off").casefold() != "off" for _, record, _ in files.gres_lines)
    for line, nodes, fields in () if files.gres is None or detected else files.node_lines:
        few: dict[str, list[str]] = {}
        for node in nodes if "GresConf" not in fields else ():
            records = _records(files, node)
            for name, kind, many in parse_gres(fields.get("Gres", "")):
                counts = [_count(row) for _, row in records.get(name.casefold(), ())
                          if kind is None or row.get("type", kind).casefold() == kind.casefold()]
                if None not in counts and (count := sum(filter(None, counts))) < many:
                    few.setdefault(f"{name}{f':{kind}' if kind else ''} {many}, but {count} in gres.conf", []).append(node)
        yield from (_hit(line, f"{listed(lacking)}: {shortage}") for shortage, lacking in few.items())


# --- topology.conf ---------------------------------------------------------------------------------------------------


def topology_hits(lines: Iterable[ConfigLine]) -> Iterator[tuple[Severity, str, ConfigLine]]:
    """Yield (severity, fault, line) of a topology.conf for text that hpc-mp accepts but Slurm refuses in a file."""
    shown = {key.casefold() for key in conf_table("topology")["shown"]}
    for line in lines:
        fields, name = line.fields, line.pairs[0][1] if line.pairs else ""
        if strange := [key for key, _ in line.pairs[1:] if key.casefold() in shown]:
            yield "error", f"{name} has {strange[0]}, which `scontrol show topology` prints but Slurm refuses in a file", line
        elif {"switchname", "nodes", "switches"} <= fields.keys():
            yield "error", f"{name} has both switches and nodes: Slurm refuses this", line
        elif "switchname" in fields and not {"nodes", "switches"} & fields.keys():
            yield "warning", f"{name} has neither switches nor nodes: Slurm before 25.05 refuses this", line
        elif not fields.get("linkspeed", "1").isdecimal():
            yield "error", f"{name} has LinkSpeed={fields['linkspeed']}, which is not a number: Slurm refuses this", line


RULES: tuple[Rule[ConfFiles], ...] = rules_of("slurm/conf-rules.toml", {
    "conf-unread": _unread,
    "conf-include": lambda files: (_hit(line, f"Include {line.unread}") for line, _, _ in _tables(files) if line.unread),
    "conf-key": _unknown_keys,
    "conf-value": _values,
    "conf-release": _of_some_releases,
    "defined-twice": _twice,
    "partition-nodes": _nodes_from_nowhere,
    "node-addresses": _addresses,
    "cpus-contradict": _processors,
    "gres-undeclared": _undeclared,
    "gres-typed": _typed,
    "gres-records": _gres_records,
    "gres-cores": _cores,
    "gres-count": _fewer_devices,
})
