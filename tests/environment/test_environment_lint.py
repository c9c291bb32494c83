"""The lint of variables on a machine: a table of faults, each with a twin that must not be named."""

import tomllib
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from bare import machine
from machines.tree import tree
from tables import table

from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.environment.conf import taken
from hpc_mp.environment.facts import facts
from hpc_mp.environment.findings import ANYWHERE, ON_MACHINE
from hpc_mp.environment.profiles import load_profile, profile_names
from hpc_mp.environment.view import View, view_of

HOME = "/home/ann"


@dataclass(frozen=True)
class Case:
    """A row of ``faults.toml``."""

    code: str
    bad: dict[str, str] = field(default_factory=dict)
    good: dict[str, str] = field(default_factory=dict)
    environ: dict[str, str] = field(default_factory=dict)
    kind: str = "plain"
    profile: str = "none"
    nccl: str | None = None
    files: tuple[str, ...] = ()


TABLE = tomllib.loads(Path(__file__).with_name("faults.toml").read_text(encoding="utf-8"))
CASES = [Case(code, **row) for code, rows in TABLE.items() for row in rows]
PLAIN = {"sys/class/net/lo/type": "772\n", "sys/class/net/eth0/type": "1\n",
         "proc/net/route": "Iface\tDestination\neth0\t00000000\t0101A8C0\n"}


def beside(folder: Path, other: NodeSource) -> NodeSource:
    """The same machine, with room for files of its own in ``/etc``."""
    for path in ("sys", "proc"):
        (folder / path).symlink_to(other.root / path)
    return NodeSource(folder, other.ask)


def seen(case: Case, folder: Path, environ: dict[str, str], text: str = "") -> View:
    folder.mkdir(exist_ok=True)
    own = machine(folder, dict.fromkeys(case.files, "") | {"/etc/nccl.conf": text} | (PLAIN if case.kind == "plain" else {}))
    return view_of(own if case.kind == "plain" else beside(folder, tree(case.kind)), {"HOME": HOME} | case.environ | environ,
                   case.profile, lambda name: case.nccl if name == "nvidia-nccl-cu12" else None)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.code}-{at}" for at, case in enumerate(CASES)])
def test_a_fault_is_named_and_its_twin_is_not(case: Case, tmp_path: Path) -> None:
    bad = seen(case, tmp_path / "bad", case.bad).findings
    assert case.code in {each.code for each in bad}, bad
    for finding in bad:
        assert "{" not in finding.message and finding.message[-1] in ".?" and finding.fix
        assert finding.subject or finding.file or finding.code == "HM657"
    good = seen(case, tmp_path / "good", case.good).findings
    assert case.code not in {each.code for each in good} and "error" not in {each.severity for each in good}, good


def test_every_rule_has_a_case() -> None:
    codes = [rule.code for rule in (*ANYWHERE, *ON_MACHINE)]
    assert len(codes) == len(set(codes))
    # HM657, releases that a platform asks for, has a test of its own
    assert {case.code for case in CASES} | {"HM657"} == {*codes}


def test_a_release_that_is_too_old_for_the_platform(tmp_path: Path) -> None:
    def codes(nccl: str) -> set[str]:
        view = view_of(tree("p5"), {}, "auto", lambda name: nccl if name == "nvidia-nccl-cu12" else None)
        return {each.code for each in view.findings}

    assert "HM657" in codes("2.17.1") and "HM657" not in codes("2.18.5")


@pytest.mark.parametrize(("release", "too_new"), [("2.29.6", True), ("2.29.7", False), ("2.30", False)])
def test_a_name_counts_from_its_release_on(release: str, too_new: bool, tmp_path: Path) -> None:
    found = seen(Case("HM656", nccl=release), tmp_path, {"NCCL_CHECK_MODE": "DEBUG_LOCAL"}).findings
    assert ("HM656" in {each.code for each in found}) is too_new


@pytest.mark.parametrize("kind", ["ndv4", "ndv5", "ndh200v5", "gb200", "p4d", "p5"])
def test_a_healthy_machine_with_its_profile_has_nothing_to_complain_of(kind: str) -> None:
    """But for files of the image, which these trees do not hold."""
    view = view_of(tree(kind), {"HOME": HOME}, "auto", lambda name: "2.27.5" if name == "nvidia-nccl-cu12" else None)
    assert {each.code for each in view.findings if each.severity != "info"} <= {"HM655"}, view.findings


def test_a_finding_names_the_line_of_the_file(tmp_path: Path) -> None:
    view = seen(Case(""), tmp_path, {}, "# site\nNCCL_TIMEOUT=3\n")
    assert [(each.file, each.line) for each in view.findings] == [("/etc/nccl.conf", 2)]
    words = "NCCL_TIMEOUT is not a variable of NCCL and has no effect."
    assert view.findings[0] == Finding("HM603", "warning", "NCCL_TIMEOUT", words, view.findings[0].fix, "/etc/nccl.conf", 2)


@pytest.mark.parametrize("name", profile_names())
def test_no_profile_is_at_odds_with_the_tables(name: str) -> None:
    """What a profile says is not one of removed, foreign, harmful: a table and a profile that disagree cannot both be right."""
    known = facts()
    for each in load_profile(name).variable:
        assert each.use == "leave" or each.name not in {*known.removed, *known.foreign, *known.legacy}


@pytest.mark.parametrize(("pattern", "names"), table(__file__, "environment_lint.toml", "lists"))
def test_lists_take_what_nccl_takes(pattern: str, names: list[str]) -> None:
    assert taken(pattern, ["lo", "eth0", "eth1", "eth10"]) == names
