"""Random commands and environments, from the job file to the program: what arrives is what was given, or it is refused."""

import os
import signal
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NoReturn

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import ProgramSpec, dump_job, resolve_any
from hpc_mp.layout.placement import Degrees, from_dict, place, to_dict
from hpc_mp.program.rank import main
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run, read_json, write_json
from hpc_mp.rundir.program import read_program, write_program
from hpc_mp.supervisor.in_container import program_script

# The shell's own words and variables, as exec gave them to it.
MARK = b"-- the environment --\0"
SHOW = r"/bin/cat /proc/$$/cmdline; printf -- '-- the environment --\0'; /bin/cat /proc/$$/environ"
PLACEHOLDERS = ("{nodes}", "{node_rank}", "{ranks_per_node}", "{master_addr}", "{run}", "{master_port}", "{other}", "{", "}}")
HARD = ("a b", "$HOME", "`id`", ";ls", "'", '"', "\n", "\r\n", "\t", "é 漢", "--nodes", "--", "", "\\", "*", "!x", "~", "%p",
        "\0", "\ud800", "#", "$(id)", "{{ x }}", "{% raw %}", "\x1b[0m", *PLACEHOLDERS)
TEXT = st.one_of(st.text(max_size=12), st.lists(st.sampled_from(HARD), max_size=4).map("".join))
NAMES = ("PATH", "HOME", "RANK", "HPC_MP_RUN", "A B", "", "1X", "PYTHONUNBUFFERED", "OMP_NUM_THREADS", "É")
NAME = st.one_of(st.sampled_from(NAMES), st.from_regex(r"[A-Za-z_]\w{0,8}", fullmatch=True))


def in_container(run: RunDirectory, environ: dict[str, str]) -> NoReturn:
    """As a container of that environment is started on the second of two hosts."""
    record = AttemptRecord("7.0.1", 1, ("n1", "n2"), environ["MASTER_ADDR"], int(environ["MASTER_PORT"]), "s")
    run.program_script.write_text(program_script(
        read_program(run.program), run, from_dict(read_json(run.placement)), record, {"HPC_MP_LOCAL": "/tmp"}))
    place = {"HPC_MP_TOKEN": "7.0.1", "SLURMD_NODENAME": "n2", "SLURM_LOCALID": "0"}
    os.execve("/bin/sh", ["/bin/sh", str(run.program_script)], environ | place)


def arrived(run: RunDirectory, environ: dict[str, str], into: Path,
            become: Callable[[RunDirectory, dict[str, str]], int]) -> tuple[list[bytes], dict[bytes, bytes]]:
    """The words and the variables of the process that a rank has become, in a fork of this one."""
    pid = os.fork()
    if pid == 0:
        try:
            os.dup2(os.open(into, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 1)
            signal.alarm(20)
            os._exit(become(run, environ))
        finally:
            os._exit(70)
    _, status = os.waitpid(pid, 0)
    assert os.waitstatus_to_exitcode(status) == 0
    words, _, variables = into.read_bytes().partition(MARK)
    pairs = (item.partition(b"=") for item in variables.split(b"\0") if item)
    return words.split(b"\0")[:-1], {name: value for name, _, value in pairs}


def check(folder: Path, form: str, arguments: list[str], own: dict[str, str], around: dict[str, str]) -> bool:
    """Whether it was taken; raises where something else has arrived."""
    start, _, container = form.partition(" in ")
    command = ["/bin/sh", "-c", SHOW, *arguments]
    tree = {"job": {"nodes": 2, "ranks_per_node": 2}, "program": {"command": command, "environment": own, "start": start}}
    try:
        spec = resolve_any(tree, folder)
    except HpcMpError as refused:
        assert refused.value and refused.rule and refused.remedy
        return False
    again = resolve_any(tomllib.loads(dump_job(spec)), Path("/elsewhere"))  # as the run directory has it
    assert isinstance(again, ProgramSpec)
    run = RunDirectory(next(iter((folder / "runs" / "x").glob("0*")), None) or create_run(folder / "runs", "x").path)
    per_node = again.tasks_per_node
    write_json(run.placement, to_dict(place(Degrees(data=2 * per_node), "cluster", per_node)))
    write_program(run.program, again)
    who = str(per_node if container else 1)  # the first rank of the second host, where the place says who a rank is
    local = str(int(who) % per_node)
    rank = {"RANK": who, "WORLD_SIZE": str(2 * per_node), "LOCAL_RANK": local, "MASTER_ADDR": "n1", "MASTER_PORT": "7"}
    words, variables = arrived(run, {"PATH": os.environ["PATH"], **around, **rank}, folder / "seen",
                               in_container if container else lambda run, environ: main(run.path, environ))
    expected = arguments
    if start == "node":
        values = {"{nodes}": "2", "{node_rank}": "1", "{ranks_per_node}": "2", "{master_addr}": "n1", "{master_port}": "7",
                  "{run}": str(run.path)}
        expected = [_filled(word, values) for word in arguments]
    assert words == [word.encode() for word in ("/bin/sh", "-c", SHOW, *expected)]
    assert {name: variables[name.encode()].decode() for name in own} == own
    names = (b"RANK", b"LOCAL_RANK", b"WORLD_SIZE", b"NODE_RANK", b"NNODES", b"MASTER_ADDR", b"MASTER_PORT")
    node, nobody = b"1" if container else b"0", [None] * 3
    assert [variables.get(name) for name in names] == {
        "rank": [who.encode(), rank["LOCAL_RANK"].encode(), b"4", node, None, b"n1", b"7"],
        "node": [*nobody, b"1", b"2", b"n1", b"7"], "mpi": [*nobody, *nobody, None]}[start]
    left_out = {"RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT", *own}
    kept = {name: value for name, value in around.items() if name not in left_out and not name.startswith("HPC_MP_")}
    assert {name: variables[name.encode()].decode() for name in kept} == kept
    return True


def _filled(word: str, values: dict[str, str]) -> str:
    """One pass from the left: what is put in is not looked at again."""
    at, out = 0, ""
    while at < len(word):
        name = next((each for each in values if word.startswith(each, at)), None)
        out, at = out + (values[name] if name else word[at]), at + (len(name) if name else 1)
    return out


AROUND = st.dictionaries(st.from_regex(r"X_[A-Z]{1,4}", fullmatch=True),
                         st.text(st.characters(exclude_categories=("Cs",), exclude_characters="\0"), max_size=8), max_size=2)
QUIET = [HealthCheck.function_scoped_fixture, HealthCheck.too_slow]


FORMS = ("rank", "node", "mpi", "rank in a container", "node in a container", "mpi in a container")


@pytest.mark.parametrize("start", FORMS)
@settings(max_examples=40, deadline=None, suppress_health_check=QUIET)
@example(["{nodes}{node_rank}", "{{run}}", '{"a": {nodes}}', "{", "{}", "{node}"], {"A": "{nodes}"}, {})
@given(st.lists(TEXT, max_size=4), st.dictionaries(NAME, TEXT, max_size=3), AROUND)
def test_a_program_gets_what_was_given(tmp_path: Path, start: str, arguments: list[str], own: dict[str, str],
                                       around: dict[str, str]) -> None:
    check(tmp_path, start, arguments, own, around)


@pytest.mark.prove
@pytest.mark.parametrize("start", FORMS)
@settings(max_examples=1000, deadline=None, suppress_health_check=QUIET)
@given(st.lists(TEXT, max_size=6), st.dictionaries(NAME, TEXT, max_size=4), AROUND)
def test_a_thousand_programs_get_what_was_given(tmp_path: Path, start: str, arguments: list[str], own: dict[str, str],
                                                around: dict[str, str]) -> None:
    taken.append(check(tmp_path, start, arguments, own, around))


taken: list[bool] = []


@pytest.mark.prove
def test_the_thousands_were_not_refused_all() -> None:
    assert not taken or (0.2 < sum(taken) / len(taken) < 0.95 and len(taken) >= 900), f"{sum(taken)} of {len(taken)}"


@pytest.mark.parametrize("broken", ["word", "variable"])
def test_the_control_is_seen(tmp_path: Path, broken: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A launcher that changes a blank, or loses a variable, is noticed."""
    import hpc_mp.program.rank as rank

    become = rank.become
    change = {"word": lambda program, environ: become(
                  rank.replace(program, command=tuple(word.replace("  ", " ") for word in program.command)), environ),
              "variable": lambda program, environ: become(program, {k: v for k, v in environ.items() if k != "OWN"})}
    monkeypatch.setattr(rank, "become", change[broken])
    with pytest.raises((AssertionError, KeyError)):
        check(tmp_path, "rank", ["a  b"], {"OWN": "x"}, {})


@pytest.mark.parametrize("broken", [("shlex.quote", lambda text: f"'{text}'"), ("_exports", lambda variables, known=None: "")],
                         ids=["word", "variable"])
def test_the_control_is_seen_in_a_container(tmp_path: Path, broken: tuple[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """A script that does not quote, or loses variables, is noticed."""
    monkeypatch.setattr(f"hpc_mp.supervisor.in_container.{broken[0]}", broken[1])
    with pytest.raises((AssertionError, KeyError)):
        check(tmp_path, "rank in a container", ["it's"], {"OWN": "x"}, {})
