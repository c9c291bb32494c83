"""The catalogue of machines: every figure has a source, rows of users count and are checked, and there is no second table."""

import ast
import json
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields
from pathlib import Path

import pytest
from click.testing import CliRunner
from machines.tree import broken
from tables import table

from hpc_mp.base import assets
from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.catalogue import GpuModel, MachineType, catalogue
from hpc_mp.catalogue.read import VARIABLE, own_files
from hpc_mp.cli.cloud import command
from hpc_mp.clouds.azure.offer import load_offer
from hpc_mp.cluster.node.gpu_pci import read_machine_type
from hpc_mp.doctor.checks.check import run
from hpc_mp.doctor.checks.host import CPU
from hpc_mp.doctor.install import pack
from hpc_mp.environment.detect import platform, read_machine
from hpc_mp.environment.profiles import profile_names
from hpc_mp.planner.collectives import expect
from hpc_mp.planner.fabrics import fabric

ROOT = Path(__file__).resolve().parents[2]
SHIPPED = catalogue()
OWNERS = ("name", "cloud", "sources")
NEW = table(__file__, "catalogue.toml", "new")
NEWBOX = {"/sys/class/dmi/id/sys_vendor": "Hobby Ltd\n", "/sys/class/dmi/id/product_name": "Box 1\n"}


@pytest.fixture
def own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A user's file; no other one of this machine counts."""
    monkeypatch.setattr(assets, "SYSTEM", tmp_path / "etc")
    monkeypatch.setenv("XDG_CONFIG_HOME", str(tmp_path / "config"))
    monkeypatch.delenv(VARIABLE, raising=False)
    file = tmp_path / "config" / "hpc-mp" / "machines.toml"
    file.parent.mkdir(parents=True)
    return file


# --- the shipped rows ----------------------------------------------------------------------------------------------------


def given(row: GpuModel | MachineType) -> set[str]:
    """The figures of a row that say something."""
    defaults = {each.name: each.default if each.default is not MISSING else each.default_factory() if each.default_factory is not
                MISSING else None for each in fields(row) if each.name not in OWNERS}
    return {name for name, none in defaults.items() if getattr(row, name) != none and getattr(row, name) not in (0, ())}


@pytest.mark.parametrize("row", [*SHIPPED.gpus.values(), *SHIPPED.machines.values()], ids=lambda row: row.name)
def test_every_figure_has_a_source(row: GpuModel | MachineType) -> None:
    assert given(row) <= set(row.sources)
    assert set(row.sources) <= {each.name for each in fields(row)} - set(OWNERS)
    assert set(row.sources.values()) <= set(SHIPPED.sources)


def test_every_source_is_used() -> None:
    rows: Iterable[GpuModel | MachineType] = (*SHIPPED.gpus.values(), *SHIPPED.machines.values())
    assert {source for row in rows for source in row.sources.values()} == set(SHIPPED.sources)


def test_a_plan_finds_what_it_counts_with() -> None:
    """Peaks, memory, its bandwidth, links and NICs of every machine with GPUs that is not retired; what is not known is None."""
    lacking = {(each.gpu.name, figure) for each in SHIPPED.machines.values() if each.gpu and not each.is_gone
               for figure in ("peak_tflops", "memory_mib", "memory_gbs", "pcie", "nvlink_gbs")
               if not getattr(each.gpu, figure)}
    assert lacking == set()
    for model in SHIPPED.gpus.values():
        assert {"fp64", "fp32", "fp16"} <= set(model.peak_tflops) <= {"fp64", "fp32", "tf32", "bf16", "fp16"}
    h100 = SHIPPED.gpu("NVIDIA H100 80GB HBM3")
    assert h100 is not None and (h100.peak_tflops["bf16"], h100.memory) == (989.4, 81559 * 2**20)
    assert SHIPPED.machine("dgx-h100") is not None and SHIPPED.machines["dgx-h100"].nodes_per_leaf == 32


@pytest.mark.parametrize(("name", "model"), table(__file__, "catalogue.toml", "gpu_names"))
def test_the_longest_name_that_fits_is_the_model(name: str, model: str | None) -> None:
    found = SHIPPED.gpu(name)
    assert (found.name if found else None) == model


# --- rows of users ---------------------------------------------------------------------------------------------------------


def test_one_row_makes_a_machine_that_doctor_planner_and_environment_know(own: Path) -> None:
    node = broken("ndv5", NEWBOX)
    assert read_machine_type(node) is None and platform(read_machine(node)).name == "infiniband"
    own.write_text(NEW)
    kind = read_machine_type(node)
    assert kind is not None and (kind.name, kind.vcpus, kind.gpu_title, kind.cloud) == ("alps", 64, "X9000 1TB", "site")
    said = [found.message for found in run([check for check in CPU if check.code == "cpu-count"], node, 60)]
    assert said == ["96 processors in 2 sockets, 2 memory nodes; a alps has 64 in 2, 2 memory nodes"]
    here = fabric("ALPS")
    assert (here.nics, here.nic, here.links, here.link) == (2, 50.0, 4, 20.6)
    assert expect("all_reduce", 2**30, 2, 8, here).busbw < expect("all_reduce", 2**30, 2, 8, fabric("ndv5")).busbw


def test_the_environments_profile_of_a_users_machine(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    node = broken("ndv5", NEWBOX)
    own.write_text(NEW.replace('gpu = "X9000"\n', ""))
    assert platform(read_machine(node)).name == "nvlink-node"
    (tmp_path / "other.toml").write_text(NEW)
    monkeypatch.setenv(VARIABLE, str(tmp_path / "other.toml"))
    assert platform(read_machine(node)).name == "infiniband", "its GPUs are no X9000"


def test_clouds_render_a_users_size(own: Path, tmp_path: Path) -> None:
    own.write_text('[azure.Standard_ND99_v9]\nlike = "Standard_ND96isr_H100_v5"\nvcpus = 99\n')
    assert load_offer().size("standard_nd99_v9") is not None and load_offer().size("p5.48xlarge") is None
    arguments = ["render", "--sku", "Standard_ND99_v9", "--nodes", "2", "--output", str(tmp_path / "out"), "--json"]
    done = CliRunner().invoke(command, arguments)
    assert done.exit_code == 0 and json.loads(done.stdout)["vcpus"] == 99
    own.unlink()
    assert CliRunner().invoke(command, arguments).exit_code != 0


@pytest.mark.parametrize("size", list(SHIPPED.of("aws", "gcp")), ids=lambda size: size.name)
def test_the_figures_of_a_machine_fit_each_other(size: MachineType) -> None:
    assert len({bool(figure) for figure in (size.gpus, size.gpu, size.nics, size.rdma, size.rdma_gbps)}) == 1
    assert size.profile in profile_names() and (not size.fabric or fabric(size.fabric).gpus == size.gpus)
    if size.fabric:
        assert fabric(size.fabric).nics * fabric(size.fabric).nic * 8 == pytest.approx(size.nics * size.rdma_gbps)


def test_the_doctor_on_a_node_knows_the_rows_that_were_packed(own: Path, tmp_path: Path) -> None:
    own.write_text(NEW)
    pack(tmp_path / "health.pyz")
    code = f"import sys; sys.path.insert(0, {str(tmp_path / 'health.pyz')!r}); from hpc_mp.catalogue import catalogue; " \
           "print(catalogue().machine('alps').gpu.nvlinks, catalogue() == catalogue(), 'pydantic' in sys.modules)"
    done = subprocess.run([sys.executable, "-IS", "-c", code], env={}, text=True, capture_output=True, check=True)
    assert done.stdout.split() == ["4", "True", "False"]


def test_what_was_measured_on_another_machine_is_not_taken_over(own: Path) -> None:
    own.write_text('[site.small]\nlike = "Standard_ND96isr_H100_v5"\nmemory_gib = 512\n'
                   '[site.other]\nlike = "p5.48xlarge"\ngpu = "H200"\n'
                   '[site.same]\nlike = "p6-b200.48xlarge"\nmemory_gib = 2048\n')
    seen = {name: (row.memory_seen_gib, row.busbw) for name, row in catalogue().machines.items()}
    assert seen.items() >= {"small": (None, 460), "other": (1999, 0), "same": (1999, 838)}.items()


def test_later_files_override_rows_by_name(own: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    site, named = tmp_path / "etc" / "hpc-mp" / "machines.toml", tmp_path / "mine.toml"
    site.parent.mkdir(parents=True)
    site.write_text('[site.a]\nlike = "DGX-H100"\nnics = 1\n[site.b]\nlike = "DGX-H100"\nnics = 1\n')
    own.write_text('[site.a]\nlike = "a"\nnics = 2\n')
    assert own_files() == (site, own)
    assert [catalogue().machines[name].nics for name in "ab"] == [2, 1]
    named.write_text('[azure.Standard_HC44rs]\nlike = "Standard_HC44rs"\nmemory_gib = 1\n[site.a]\nlike = "b"\n')
    monkeypatch.setenv(VARIABLE, str(named))
    changed, shipped = catalogue().machines["standard_hc44rs"], SHIPPED.machines["standard_hc44rs"]
    assert catalogue().machines["a"].nics == 1 and (changed.memory_gib, changed.vcpus) == (1, shipped.vcpus)
    assert changed.sources["memory_gib"] == str(named) and changed.sources["vcpus"] == "docs"
    assert next(iter(catalogue().machines)) == "standard_hc44rs", "a user's rows are tried first"


@pytest.mark.parametrize(("text", "words"), table(__file__, "catalogue.toml", "wrong"))
def test_what_is_wrong_in_a_users_file_is_said(text: str, words: str, own: Path) -> None:
    own.write_text(text)
    with pytest.raises(HpcMpError) as caught:
        catalogue()
    assert re.search(words, str(caught.value), re.DOTALL), str(caught.value)


def test_a_file_that_is_named_and_not_there_is_refused(own: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(VARIABLE, str(own.parent / "none.toml"))
    with pytest.raises(HpcMpError, match=r"none\.toml.*cannot be read"):
        catalogue()


# --- one table ---------------------------------------------------------------------------------------------------------------

NAMES = re.compile("|".join(re.escape(name) for name in (*SHIPPED.gpus, *(each.name for each in SHIPPED.machines.values()))))


def tables(tree: ast.AST) -> Iterator[int]:
    """Lines where a name of the catalogue and figures stand in one row: a call, a tuple, or an entry of a dictionary."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Dict):
            rows = [[key, *leaves(value)] for key, value in zip(node.keys, node.values, strict=True)]
        elif isinstance(node, ast.Call | ast.Tuple | ast.List):
            rows = [[leaf for part in ast.iter_child_nodes(node) for leaf in leaves(part)]]
        else:
            continue
        for row in rows:
            values = [leaf.value for leaf in row if isinstance(leaf, ast.Constant)]
            figures = [value for value in values if type(value) in (int, float) and value not in (0, 1)]
            if figures and any(isinstance(value, str) and NAMES.fullmatch(value) for value in values):
                yield node.lineno


def leaves(node: ast.AST) -> list[ast.AST]:
    """A constant, those of a call's or tuple's own arguments, and no deeper."""
    if isinstance(node, ast.keyword):
        node = node.value
    inner = [*node.args, *(each.value for each in node.keywords)] if isinstance(node, ast.Call) else \
        node.elts if isinstance(node, ast.Tuple | ast.List) else []
    return [node, *inner]


def test_no_second_table_stands_in_the_code() -> None:
    sources = {file: file.read_text(encoding="utf-8") for file in sorted((ROOT / "hpc_mp").rglob("*.py"))}
    found = [f"{file.relative_to(ROOT)}:{line}" for file, source in sources.items() if NAMES.search(source)
             for line in tables(ast.parse(source))]
    assert found == []


@pytest.mark.parametrize("planted", ['T = {"H200": 141}', 'T = (("A100-SXM", 12, 25.0),)', 'Kind("p5.48xlarge", gpus=8)',
                                     'T = {"H200": Model(18, 26.5)}', 'T = {"GB200": (4, 72)}'])
def test_a_second_table_would_be_found(planted: str) -> None:
    assert list(tables(ast.parse(planted)))


def test_no_second_table_stands_beside_the_catalogue() -> None:
    """Of the data that is shipped, no other file has a figure of a machine, or a GPU's number by which one is known."""
    figure = re.compile(r"^(vcpus|nvlinks|memory_gib|rdma_gbps|gpus|nics|links?|nic) = \d|\b0x[0-9a-f]{4}\b", re.MULTILINE)
    files = [file for folder in ("env", "slurm", "cyclecloud") for file in asset(folder).rglob("*.toml")
             if figure.search(file.read_text(encoding="utf-8"))]
    assert files and {file.parent.name for file in files} == {"machines"}
