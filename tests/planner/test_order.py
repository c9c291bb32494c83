"""The order of ranks and of hosts that a job gets."""

from __future__ import annotations

import time
from itertools import combinations
from pathlib import Path
from typing import Any

import pytest
from placements import FABRIC

from hpc_mp.cluster.bandwidth import LinkRates
from hpc_mp.cluster.topology import SwitchTree, read_topology
from hpc_mp.job import JobSpec, resolve
from hpc_mp.layout.models import read_shape
from hpc_mp.layout.placement import place
from hpc_mp.planner.hosts import choose_host_order, expected_slow_links, kept_order_words
from hpc_mp.planner.order import choose_rank_order
from hpc_mp.planner.traffic import degrees_of, traffic_of
from hpc_mp.rundir.plan import Traffic

GIVEN, PAIRED = ("n1", "n2", "n3", "n4"), ("n1", "n3", "n2", "n4")


def measured(days: float = 3, **rates: float) -> LinkRates:
    """So long ago, 0.0239 GB/s between any of n1 to n4, but for ``n1_n2`` and the like."""
    pairs = [(i, j, rates.get(f"{GIVEN[i]}_{GIVEN[j]}", 0.0239)) for i, j in combinations(range(4), 2)]
    return LinkRates("lab", time.time() - days * 86400, GIVEN, tuple(pairs))


def job(device: str = "cpu", microbatches: int = 4, **parallel: Any) -> JobSpec:
    """T2 P2 D2 on 4 × 2 ranks; two layers per stage."""
    return resolve({
        "job": {"nodes": 4, "ranks_per_node": 2, "device": device},
        "model": {"config": {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688,
                             "num_attention_heads": 8, "num_key_value_heads": 4, "vocab_size": 1024}},
        "data": {"files": ["text"], "sequence_length": 128},
        "parallel": {"tensor": 2, "pipeline": 2, "microbatches": microbatches, **parallel},
        "train": {"steps": 1, "global_batch": 2 * microbatches},
    }, Path("/"))


def order(spec: JobSpec) -> str:
    return choose_rank_order(spec, traffic(spec)).letters


def traffic(spec: JobSpec) -> Traffic:
    return traffic_of(spec, read_shape(spec), (2, 2))


@pytest.mark.parametrize(("spec", "letters"), [
    (job("cuda"), "DPT"),  # 3.4 MB of gradients a rank and step, 4.2 MB of tensor traffic
    (job("cpu"), "DPT"),
    (job("cpu", microbatches=16), "DPT"),
    (job("cpu", rank_map="cyclic"), "TDP"),  # the left-most letter stays inside a node
    (job("cpu", order="spread"), "TPD"),
])
def test_the_order_follows_traffic_and_map(spec: JobSpec, letters: str) -> None:
    assert order(spec) == letters


def test_the_reason_gives_bytes() -> None:
    spec = job()
    assert choose_rank_order(spec, traffic(spec)).why == (
        "a step waits for 7.91 MB on links between nodes, in the worst order 16.3 MB")


def test_the_reason_gives_seconds_where_the_doctor_has_measured() -> None:
    spec = job()
    def why(days: float) -> str:
        return choose_rank_order(spec, traffic(spec), measured(days, n1_n2=0.01)).why

    bytes_alone = "a step waits for 7.91 MB on links between nodes, in the worst order 16.3 MB"
    assert why(3) == f"{bytes_alone}; 331 ms at the 23.9 MB/s measured 3 d ago"
    assert why(31) == bytes_alone


def hosts(spec: JobSpec, letters: str, tree: SwitchTree, rates: LinkRates | None = None) -> tuple[tuple[str, ...], str]:
    placement = place(degrees_of(spec), letters, 2, spec.parallel.rank_map)
    return choose_host_order(placement, traffic(spec), GIVEN, tree, rates)


def test_hosts_follow_the_traffic_of_the_order() -> None:
    tree = read_topology(FABRIC)
    # PDT: nodes are (stage, replica). Gradients are heavy, activations light: both replicas of a stage under one leaf.
    assert hosts(job(), "PDT", tree) == (PAIRED, (
        "rank map: n1 n3 n2 n4 → 2.1 MB per step out of the busiest leaf switch, 13.7 MB in the order given"))
    # DPT: nodes are (replica, stage): as given, the replicas of a stage are under one leaf already.
    assert hosts(job(), "DPT", tree)[0] == GIVEN


def test_hosts_stay_as_given_without_a_topology() -> None:
    assert hosts(job(), "PDT", SwitchTree())[0] == GIVEN


def test_hosts_follow_measured_rates() -> None:
    """DPT: nodes are (replica, stage). 1 and 3, 2 and 4 are replicas of a stage, 1 and 2, 3 and 4 stages of a replica."""
    nothing, tree = SwitchTree(), read_topology(FABRIC)
    assert hosts(job(), "DPT", nothing, measured(n1_n3=0.0239 * 0.38)) == (("n1", "n2", "n4", "n3"), (
        "rank map: n1 n2 n4 n3 → 331 ms per step on the busiest path at the rates measured 3 d ago, 755 ms in the order given; "
        "n1–n3 has 38 % of the usual rate: carries nothing"))
    assert hosts(job(), "DPT", nothing, measured(n1_n2=0.0239 * 0.38))[0] == ("n1", "n4", "n3", "n2")
    # Negative controls: a slow way that nothing goes by, rates that are almost alike or old.
    assert hosts(job(), "DPT", nothing, measured(n1_n4=0.0239 * 0.38))[0] == GIVEN
    for alike in (measured(n1_n3=0.0239 * 0.9), measured(days=31, n1_n3=0.001)):
        assert hosts(job(), "DPT", nothing, alike) == (GIVEN, "rank map: in Slurm's order of hosts")
        assert hosts(job(), "PDT", tree, alike) == hosts(job(), "PDT", tree)


def test_switches_decide_between_orders_that_rates_call_equal() -> None:
    """PDT wants n1 beside n3 (``FABRIC``); a slow n1–n2 must stand at a corner that nothing crosses."""
    tree = read_topology(FABRIC)
    assert hosts(job(), "PDT", tree)[0] == hosts(job(), "PDT", tree, measured(n1_n4=0.001))[0] == PAIRED
    assert hosts(job(), "PDT", tree, measured(n1_n2=0.001))[0] == ("n1", "n3", "n4", "n2")
    assert hosts(job(), "PDT", tree, measured(n1_n3=0.001))[0] not in (PAIRED, ("n1", "n3", "n4", "n2"))


@pytest.mark.parametrize(("rates", "words"), [
    (measured(n2_n3=0.001), "; it does not avoid slow links, measured 3 d ago: n2–n3 has 4 % of the usual rate"),
    (measured(n1_n4=0.0001, n2_n3=0.001), "n1–n4 has 0 % of the usual rate, n2–n3 has 4 % of the usual rate"),
    (measured(days=40, n2_n3=0.001), "its traffic is unknown"), (measured(), "its traffic is unknown"),
    (None, "its traffic is unknown")])
def test_a_program_whose_hosts_keep_their_order_is_told_of_slow_links(rates: Any, words: str) -> None:
    assert kept_order_words(GIVEN, rates).endswith(words)
    assert "slow links" not in kept_order_words(("n1", "n2"), rates)


def test_a_launch_says_what_hosts_will_be_put_in_order_by() -> None:
    assert expected_slow_links("auto", 4, measured(n2_n3=0.001)) == (
        "slow links will carry the least: measured 3 d ago, n2–n3 has 4 % of the usual rate")
    assert expected_slow_links("auto", 4, measured(days=40, n2_n3=0.001)) == (
        "rates were measured 40 d ago and are used for 30 days: run `hpc-mp doctor` again")
    assert expected_slow_links("auto", 4, None) is expected_slow_links("auto", 4, measured()) is None
    assert expected_slow_links("cyclic", 4, measured(n2_n3=0.001)) is None
