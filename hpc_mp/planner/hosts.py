"""The assignment of hosts to the nodes of a placement: by the switches between them, by measured rates, with the reason."""

from collections.abc import Callable, Mapping, Sequence

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import data_size, duration
from hpc_mp.cluster.bandwidth import COUNTS_DAYS, LinkRates, TieredRates, rates
from hpc_mp.cluster.topology import SwitchTree
from hpc_mp.layout.placement import Placement, RankMap
from hpc_mp.planner.links import AXES, flows, unit_loads
from hpc_mp.rundir.plan import Traffic

SLOW_SHOWN = 3
Flows = Mapping[tuple[int, int], Traffic]


def choose_host_order(placement: Placement, traffic: Traffic, hosts: tuple[str, ...], tree: SwitchTree,
                      measured: LinkRates | None = None) -> tuple[tuple[str, ...], str]:
    """Return the host of every node of the placement, and the reason: by measured rates between hosts and by the switches."""
    host_rates = rates(measured) if measured is not None and measured.recent() else None
    uneven = host_rates is not None and host_rates.uneven(hosts)
    if not uneven and not tree.above:
        return hosts, "rank map: in Slurm's order of hosts"
    from hpc_mp.planner.assignment import cheapest_hosts, hosts_cost, step_times  # slow to import
    ordered = cheapest_hosts(placement, traffic, hosts, tree, host_rates)
    if measured is None or host_rates is None or not uneven:
        return ordered, host_words(hosts_cost(placement, traffic, tree), hosts, ordered)
    times = [step_times(placement, traffic, host_rates)(order)[0] for order in (ordered, hosts)]
    return ordered, rate_words(flows(placement, traffic), times, ordered, host_rates, measured.when())


def kept_order_words(hosts: Sequence[str], measured: LinkRates | None) -> str:
    """Describe an order of hosts that a program's ranks keep, and the slow links, which this order does not avoid."""
    slow = _slow_links(measured, hosts) if measured is not None and measured.recent() else ""
    return ("rank map: in Slurm's order of hosts: each rank is the task of the same number, and its traffic is unknown"
            + (f"; it does not avoid slow links, measured {measured.when()}: {slow}" if measured is not None and slow else ""))


def expected_slow_links(rank_map: RankMap, nodes: int, measured: LinkRates | None) -> str | None:
    """Describe the slow links of the cluster that ``choose_host_order`` will handle, before the job's nodes are known."""
    if measured is None or rank_map != "auto" or nodes == 1:
        return None
    if not measured.recent():
        return f"rates were measured {measured.when()} and are used for {COUNTS_DAYS} days: run `hpc-mp doctor` again"
    slow = _slow_links(measured, measured.nodes)
    return f"slow links will carry the least: measured {measured.when()}, {slow}" if slow else None


def leaves(placement: Placement, hosts: Sequence[str], tree: SwitchTree) -> tuple[str, ...]:
    """Return the leaf switch of every rank; a host that the tree does not name counts as a separate leaf. Raises HpcMpError for
    fewer hosts than the placement has nodes."""
    if len(hosts) < placement.nodes:
        raise HpcMpError(f"{len(hosts)} hosts", f"are fewer than the {placement.nodes} nodes of the placement",
                         f"name {placement.nodes} hosts")
    return tuple(tree.leaf(hosts[place.node]) or hosts[place.node] for place in placement.ranks)


def uplinks(placement: Placement, traffic: Traffic, hosts: Sequence[str], tree: SwitchTree) -> dict[str, Traffic]:
    """Return the bytes per axis that leave each leaf switch in one optimizer step. Raises HpcMpError like ``leaves``."""
    return unit_loads(placement, traffic, leaves(placement, hosts, tree))


def host_words(cost: Callable[[Sequence[str]], float], initial: Sequence[str], ordered: Sequence[str]) -> str:
    """Return ``rank map: n1 n3 n2 n4 → 8.1 MB per step out of the busiest leaf switch, 12.3 MB in the order given``."""
    before, after = cost(initial), cost(ordered)
    leaves = f"{data_size(after)} per step out of the busiest leaf switch" if after else "no traffic leaves a leaf switch"
    return f"rank map: {' '.join(ordered)} → {leaves}" + (f", {data_size(before)} in the order given" if before else "")


def rate_words(sent: Flows, times: Sequence[float], ordered: Sequence[str], rates: TieredRates, when: str) -> str:
    """Describe an order of hosts and its slow links by measured rates: ``rank map: n1 n2 n4 n3 → 390 ms per step … at the rates
    measured 3 d ago, 810 ms in the order given; n2–n3 has …``."""
    node = {host: number for number, host in enumerate(ordered)}

    def carried(members: tuple[str, ...]) -> str:
        crossing = [load for (a, b), load in sent.items()
                if {node[host] for host in members} == ({a, b} if len(members) == 2 else {a})]
        axes = dict.fromkeys(kind for axis, (kind, _) in AXES.items() if any(getattr(load, axis) for load in crossing))
        return f"{'carries' if len(members) == 2 else 'sends'} {' and '.join(axes) or 'nothing'}{' only' * (len(axes) == 1)}"

    slow = [f"{text}: {carried(members)}" for members, text in slow_words(rates, ordered)]
    return "; ".join([f"rank map: {' '.join(ordered)} → {duration(times[0])} per step on the busiest path "
                      f"at the rates measured {when}, {duration(times[1])} in the order given", *_some(slow)])


def slow_words(rates: TieredRates, hosts: Sequence[str]) -> list[tuple[tuple[str, ...], str]]:
    """Return the host or the two hosts, and ``n2–n3 has 38 % of the usual rate``."""
    return [(members, f"{'–'.join(members)} has {100 * share:.0f} % of the usual rate")
            for members, share in rates.slow(hosts).items()]


def _slow_links(measured: LinkRates, hosts: Sequence[str]) -> str:
    return ", ".join(_some([text for _, text in slow_words(shares, hosts)])) if (shares := rates(measured)) is not None else ""


def _some(texts: list[str]) -> list[str]:
    more = len(texts) - SLOW_SHOWN
    return [*texts[:SLOW_SHOWN], *([f"and {more} more"] if more > 0 else [])]
