"""Where ranks are told to meet: by the supervisor that knows their hosts, else by what starts them."""

from __future__ import annotations

from hpc_mp.rundir import AttemptRecord
from hpc_mp.train.rank.rendezvous import Rendezvous, rendezvous

TORCHRUN = {"MASTER_ADDR": "n7", "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_known_hosts_go_before_variables() -> None:
    assert rendezvous(AttemptRecord("1.0.1", 1, ("n1",), "n1", 4711), TORCHRUN) == Rendezvous("n1", 4711, "1.0.1")


def test_without_known_hosts_the_launcher_says_where() -> None:
    record = AttemptRecord("here.8.1", 1, (), "", 4711)
    assert rendezvous(record, TORCHRUN) == Rendezvous("n7", 29400, "here.8.1", hosted=False)
    assert rendezvous(record, {"MASTER_PORT": "4711"}) == Rendezvous("127.0.0.1", 4711, "here.8.1")
