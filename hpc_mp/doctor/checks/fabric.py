"""Checks of the fast network: ports, their rates, keys and addresses."""

from collections import Counter
from collections.abc import Iterator

from hpc_mp.base.findings import Severity
from hpc_mp.cluster.node.rdma import Efa, RdmaFabric, RdmaPort, read_efa, read_fabric
from hpc_mp.doctor.checks.check import Judgement, checks_of

_FULL = 0x8000  # full-membership bit of a partition key; two limited members cannot communicate
_MODULES: tuple[tuple[str, str, Severity], ...] = (("verbs", "ib_uverbs", "error"), ("mad", "ib_umad", "warning"))
_ROCE_MTU = 4200  # bytes of an Ethernet frame with 4096 bytes of RDMA payload


def count(fabric: RdmaFabric) -> Iterator[Judgement]:
    kind = fabric.kind
    if fabric.bare:
        yield Judgement("error",
                        f"{len(fabric.bare)} adapters for RDMA on the PCI bus have no RDMA device: no driver has taken them",
                        ", ".join(fabric.bare))
    if kind is None:
        return
    port_count = len(fabric.ports)
    evidence = f"{port_count} ports; a {kind.name} has {kind.nics}"
    if port_count == kind.nics:
        yield Judgement("ok", evidence)
    elif port_count == 0 and kind.rdma_optional:
        yield Judgement("warning", f"{evidence}, unless it was rented without")
    else:
        yield Judgement("error", evidence)


def modules(fabric: RdmaFabric) -> Iterator[Judgement]:
    if not fabric.adapters:
        return
    band = any(port.layer == "InfiniBand" for port in fabric.ports)
    missing = [row for row in _MODULES if fabric.abi[row[0]] is None and (band or row[0] != "mad")]
    for name, module, grave in missing:
        yield Judgement(grave, f"/sys/class/infiniband_{name}/abi_version is not there: {module} is not loaded", module,
                        f"modprobe {module}, and have it loaded at boot")
    for adapter in fabric.adapters:
        if adapter.verbs is False:
            yield Judgement("error", "its file /dev/infiniband/uverbs… is not there", adapter.name,
                            "give the container its /dev/infiniband, or look why udev made none")
    if not missing and all(adapter.verbs is not False for adapter in fabric.adapters):
        yield Judgement("ok", f"verbs interface {fabric.abi['verbs']}, {len(fabric.adapters)} devices")


def state(fabric: RdmaFabric) -> Iterator[Judgement]:
    for port in fabric.ports:
        if port.up:
            yield Judgement("ok", f"{port.state}, {port.physical}", port.name)
        elif _may_be_free(fabric, port):
            yield Judgement("ok", f"{port.state}, {port.physical}: not in use, and was never up", port.name)
        else:
            grave: Severity = "warning" if port.layer == "Ethernet" else "error"
            cure = ("the cable is in, the subnet manager has not brought the port up: look at it (sminfo, opensm's log)"
                    if port.physical.endswith("LinkUp") else
                    "look at the cable, the transceiver and the switch's port; replace them, or else the adapter")
            yield Judgement(grave, f"state {port.state or 'unknown'}, physical state "
                            f"{port.physical or 'unknown'}; 4: ACTIVE and 5: LinkUp were expected", port.name, cure)


def _may_be_free(fabric: RdmaFabric, port: RdmaPort) -> bool:
    """Return True for a virtual function, or if another port of the card is up on a machine that is not in the catalogue."""
    own = fabric.adapter(port)
    card = (other for adapter in fabric.adapters if adapter.card == own.card and not adapter.virtual for other in adapter.ports)
    return not port.dropped and (own.virtual or (fabric.kind is None and any(other.up for other in card)))


def rate(fabric: RdmaFabric) -> Iterator[Judgement]:
    ports = [(port, port.rate) for port in fabric.ports if port.up and port.rate is not None]
    models = {port.name: fabric.adapter(port).board or fabric.adapter(port).model for port, _ in ports}
    for port, rate in ports:
        if fabric.kind is not None:
            expected, why = float(fabric.kind.rdma_gbps), f"a {fabric.kind.name} has"
        else:
            alike = Counter(other_rate for other, other_rate in ports if models[other.name] == models[port.name])
            expected, why = max(alike, key=lambda speed: (alike[speed], speed)), "its likes here have"
        yield Judgement("ok" if rate >= expected else "error", f"{rate:g} Gb/s; {why} {expected:g}", port.name)


def subnet(fabric: RdmaFabric) -> Iterator[Judgement]:
    for port in fabric.ports:
        if not port.up or port.layer != "InfiniBand" or port.lid is None:
            continue
        good = port.lid != 0 and bool(port.manager)
        yield Judgement("ok" if good else "error",
                        f"own address {port.lid:#x}, subnet manager's {port.manager or 0:#x}" + ("" if good else "; 0 is none"),
                        port.name)


def firmware(fabric: RdmaFabric) -> Iterator[Judgement]:
    boards: dict[str, Counter[str]] = {}
    for adapter in fabric.adapters:
        if adapter.board and adapter.firmware:
            boards.setdefault(adapter.board, Counter())[adapter.firmware] += 1
    for board, versions in boards.items():
        if len(versions) == 1:
            yield Judgement("ok", f"firmware {next(iter(versions))} on all {versions.total()}", board)
        else:
            yield Judgement("warning", "firmware differs between adapters of one model: "
                            + ", ".join(f"{version} on {many}" for version, many in versions.most_common()), board)


def partition(fabric: RdmaFabric) -> Iterator[Judgement]:
    ports = [port for port in fabric.ports if port.up and port.layer == "InfiniBand"]
    networks: dict[tuple[object, ...], Counter[int]] = {}
    for port in ports:
        networks.setdefault(_network(fabric, port), Counter())[port.keys.get(0, 0)] += 1
    for port in ports:
        first, firsts = port.keys.get(0, 0), networks[_network(fabric, port)]
        evidence = f"key 0 is {first:#06x}"
        if not first:
            yield Judgement("error", "partition table has no key at index 0, which NCCL uses", port.name)
        elif not any(key & _FULL for key in port.keys.values()):
            yield Judgement("error", f"{evidence}, and no key in the table is a full membership: "
                            "two limited members cannot talk to each other", port.name)
        elif firsts[first] < max(firsts.values()):
            yield Judgement("error", f"{evidence}; most ports here have {firsts.most_common(1)[0][0]:#06x}", port.name)
        else:
            yield Judgement("ok", evidence, port.name)


def _network(fabric: RdmaFabric, port: RdmaPort) -> tuple[object, ...]:
    """Return the properties that ports of one network share. A storage network has other cards, rates, managers and keys."""
    prefix = port.gids[0].value.rsplit(":", 4)[0] if port.gids else ""
    return fabric.adapter(port).board, port.rate, port.manager, prefix


def addresses(fabric: RdmaFabric) -> Iterator[Judgement]:
    for port in fabric.ports:
        if not port.up:
            continue
        usable = [gid for gid in port.gids if port.layer != "Ethernet" or (gid.type == "RoCE v2" and ":ffff:" in gid.value)]
        if usable:
            yield Judgement("ok", f"{usable[0].value} at index {usable[0].index}", port.name)
        elif port.gids:
            yield Judgement("warning", f"{len(port.gids)} addresses, none of them RoCE v2 over IPv4", port.name,
                            "give the port's interface an IPv4 address: without one RDMA cannot be routed")
        else:
            yield Judgement("error", "its table of addresses (GIDs) is empty", port.name)


def packet(fabric: RdmaFabric) -> Iterator[Judgement]:
    ports = [(port, port.mtu) for port in fabric.ports if port.up and port.mtu is not None]
    largest = max((mtu for _, mtu in ports), default=0)
    for port, mtu in ports:
        if mtu < largest or (mtu < 4096 and port.layer == "InfiniBand"):
            yield Judgement("warning", f"active MTU {mtu}; {max(largest, 4096)} was expected", port.name)
        elif mtu < 4096:
            yield Judgement("warning", f"active MTU {mtu} of 4096", port.name,
                            f"set the MTU of its interface to at least {_ROCE_MTU} (9000 is usual), on the switch too")
        else:
            yield Judgement("ok", f"active MTU {mtu}", port.name)


CHECKS = checks_of(read_fabric, {
    "fabric-count": count,
    "fabric-modules": modules,
    "fabric-port": state,
    "fabric-rate": rate,
    "fabric-subnet": subnet,
    "fabric-firmware": firmware,
    "fabric-partition": partition,
    "fabric-gid": addresses,
    "fabric-mtu": packet,
})


def efa_software(efa: Efa) -> Iterator[Judgement]:
    if not any(adapter.efa for adapter in efa.fabric.adapters):
        return
    if efa.library is None:
        yield Judgement("error", "is not in any of its places: NCCL would fall back to sockets", "libfabric")
    if efa.plugin is None:
        yield Judgement("warning", "is not in any of its places; a container may bring its own", "aws-ofi-nccl",
                        "install it (the EFA installer does, since 1.29), or see that the container has it")
    if efa.library and efa.plugin:
        yield Judgement("ok", f"driver {efa.driver or 'of unknown version'}, {efa.library}, {efa.plugin}")


EFA = checks_of(read_efa, {"efa-software": efa_software})
