"""NCCL's files and their precedence, against a literal retelling of the C in its src/misc/param.cc (2.30.7)."""

import ctypes
import tempfile
from pathlib import Path
from typing import get_args

from bare import machine
from hypothesis import example, given
from hypothesis import strategies as st

from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.environment.apply import Applied
from hpc_mp.environment.conf import nccl_files, read_file, read_lines, read_number, user_path
from hpc_mp.environment.facts import facts
from hpc_mp.environment.precedence import Effective, Origin, Said
from hpc_mp.environment.profiles import Profile
from hpc_mp.environment.view import effective

# --- the C, letter by letter ------------------------------------------------------------------------------------------


def fgets(data: bytes, at: int, size: int) -> tuple[bytes, int]:
    """What lies in the buffer up to its first NUL, and where the file goes on."""
    end = at
    while end < len(data) and end - at < size - 1:
        end += 1
        if data[end - 1] == ord("\n"):
            break
    return (data[at:end] + b"\0").split(b"\0")[0], end


def set_env_file(data: bytes | None, env: dict[bytes, bytes]) -> None:
    at = 0
    while data is not None and at < len(data):
        line, at = fgets(data, at, 4096)
        length = len(line)
        if length > 0 and line[length - 1] == ord("\n"):
            length -= 1
            line = line[:length]
        if length > 0 and line[length - 1] == ord("\r"):
            length -= 1
            line = line[:length]
        if line[:1] == b"#":
            continue
        s = 0
        while s < len(line) and line[s] != ord("="):
            s += 1
        if s == len(line):
            continue
        name = line[:min(1023, s)]
        value = line[s + 1:][:1023]
        if name and name not in env:  # setenv(name, value, 0); an empty name is an error that nobody looks at
            env[name] = value


def init_env(process: dict[bytes, bytes], files: dict[bytes, bytes]) -> dict[bytes, bytes]:
    """Of the process, once NCCL has read its files."""
    env = dict(process)
    user = env.get(b"NCCL_CONF_FILE")
    if user:
        set_env_file(files.get(user), env)
    elif b"HOME" in env:
        set_env_file(files.get(env[b"HOME"] + b"/.nccl.conf"), env)
    set_env_file(files.get(b"/etc/nccl.conf"), env)
    return env


# --- ours -------------------------------------------------------------------------------------------------------------


def ours(process: dict[bytes, bytes], files: dict[bytes, bytes]) -> dict[str, Effective]:
    with tempfile.TemporaryDirectory() as folder:
        source = machine(Path(folder), {name.decode(): data for name, data in files.items()})
        environ = {decoded(name): decoded(value) for name, value in process.items()}
        return {each.name: each for each in effective(environ, nccl_files(source, environ), None)}


def decoded(data: bytes) -> str:
    return data.decode("utf-8", "surrogateescape")


PIECES = st.sampled_from([b"NCCL_A", b"NCCL_B", b"NCCL_IB_TC", b"=", b"=", b"\n", b"\n", b"\r", b"#", b" ", b"\0", b"\"1\"", b"1",
                          b"export ", b"\xff", "é".encode(), b"x" * 1022, b"y" * 4090])
FILE = st.lists(PIECES, max_size=14).map(b"".join)
PROCESS = st.dictionaries(st.sampled_from([b"NCCL_A", b"NCCL_B", b"NCCL_IB_TC"]), st.sampled_from([b"", b"p", b"\xff"]))
WHERE = st.sampled_from([{}, {b"HOME": b"/home/ann"}, {b"HOME": b"/home/ann", b"NCCL_CONF_FILE": b""},
                         {b"HOME": b"/home/ann", b"NCCL_CONF_FILE": b"/site/nccl"},
                         {b"HOME": b"/home/ann", b"NCCL_CONF_FILE": b"/not/there"}, {b"NCCL_CONF_FILE": b"/site/nccl"}])
NAMES = (b"/home/ann/.nccl.conf", b"/site/nccl", b"/etc/nccl.conf")


@given(PROCESS, WHERE, st.lists(st.one_of(st.none(), FILE), min_size=3, max_size=3))
@example({}, {b"HOME": b"/home/ann"}, [b"NCCL_A=1\nNCCL_A=2\r\n", None, b"NCCL_A=3\nNCCL_B=4"])
@example({}, {b"HOME": b"/home/ann", b"NCCL_CONF_FILE": b""}, [b"NCCL_A=1", None, None])
@example({}, {b"HOME": b"/home/ann", b"NCCL_CONF_FILE": b"/site/nccl"}, [b"NCCL_A=1", b"NCCL_A=2", b"NCCL_A=3"])
@example({b"NCCL_A": b""}, {}, [None, None, b"NCCL_A=3\r\0=\n#NCCL_B=1\n NCCL_B=2\n=5\n"])
@example({}, {}, [None, None, b"x" * 4090 + b"NCCL_A=1\n"])
@example({}, {}, [None, None, b"NCCL_A=" + b"x" * 2000 + b"\nNCCL_B==ens1f0 \r\nexport NCCL_IB_TC=1\n # NCCL_IB_TC=1\nNCCL_A\n"])
def test_files_and_process_come_to_what_nccl_makes_of_them(process: dict[bytes, bytes], where: dict[bytes, bytes],
                                                           contents: list[bytes | None]) -> None:
    files = {name: data for name, data in zip(NAMES, contents, strict=True) if data is not None}
    wanted = init_env(process | where, files)
    settled = {name: each.value for name, each in ours(process | where, files).items() if each.origin != "default"}
    settled |= {name.decode(): decoded(value) for name, value in where.items()}  # HOME is not ours to show
    assert settled == {decoded(name): decoded(value) for name, value in wanted.items()}


def test_the_retelling_can_tell_right_from_wrong() -> None:
    """The negative control: each rule of the C, broken by hand, gives another environment."""
    assert init_env({b"A": b""}, {b"/etc/nccl.conf": b"A=1"}) == {b"A": b""} != {b"A": b"1"}
    assert init_env({}, {b"/etc/nccl.conf": b"A=1\nA=2"}) == {b"A": b"1"}
    home = {b"HOME": b"/h"}
    assert init_env(home, {b"/h/.nccl.conf": b"A=1", b"/etc/nccl.conf": b"A=2\nB=3"}) == home | {b"A": b"1", b"B": b"3"}
    named = home | {b"NCCL_CONF_FILE": b"/none"}
    assert init_env(named, {b"/h/.nccl.conf": b"A=1"}) == named


# --- rules, one by one ------------------------------------------------------------------------------------------------


def test_lines_have_their_numbers() -> None:
    assert [line.line for line in read_lines(b"\n# c\nNCCL_A=1\nnothing\n\nNCCL_B=2\n=3\n")] == [3, 6]


def test_nccl_does_not_know_what_a_tilde_means() -> None:
    assert user_path({"HOME": "/h", "NCCL_CONF_FILE": "~/x"}) == str(Path("~/x").absolute())


# --- the sources, strongest first -------------------------------------------------------------------------------------

PLATFORM = Profile(name="p", title="t")
SPEAKERS = ("process", "user file", "system file", "profile")


@given(st.sets(st.sampled_from(SPEAKERS)), st.sets(st.sampled_from(SPEAKERS)))
def test_the_strongest_source_that_speaks_counts_and_hides_the_others(speaking: set[str], empty: set[str]) -> None:
    """Process, user's file, system's file, profile, NCCL's default; what says nothing at all is no ``""``."""
    assert get_args(Origin)[:4] == SPEAKERS
    says = {who: "" if who in empty else who for who in speaking}
    files = {name: f"NCCL_IB_HCA={says[who]}\n" for name, who in
             (("/home/ann/.nccl.conf", "user file"), ("/etc/nccl.conf", "system file")) if who in says}
    environ = {"HOME": "/home/ann"} | ({"NCCL_IB_HCA": says["process"]} if "process" in says else {})
    said = tuple(Said("NCCL_IB_HCA", says[who], "profile", "p") for who in says if who == "profile")
    applied = Applied(PLATFORM, said, (), (), ())
    with tempfile.TemporaryDirectory() as folder:
        read = nccl_files(machine(Path(folder), files), environ)
        (found,) = (each for each in effective(environ, read, applied) if each.name == "NCCL_IB_HCA")
    order = [who for who in SPEAKERS if who in says]
    assert found.origin == (order[0] if order else "default")
    assert found.value == (says[order[0]] if order else None)
    assert [(said.origin, said.value) for said in found.hides] == [(who, says[who]) for who in order[1:]]


def test_a_number_is_what_nccl_reads_and_else_its_default() -> None:
    def read(value: str) -> int | None:
        (each,) = (each for each in effective({"NCCL_IB_TIMEOUT": value}, (read_file(NodeSource(Path("/nowhere")), "/x"),), None)
                   if each.name == "NCCL_IB_TIMEOUT")
        return each.read

    assert [read(text) for text in ("22", "", "fast", "022", "0x16", "99999999999999999999")] == [22, 20, 0, 18, 22, 20]


@given(st.text(alphabet=" \t+-0123456789abcdefxXgG#", max_size=24))
@example(str(2**63 - 1))
@example(str(2**63))
@example(str(-2**63))
@example("-0x10")
@example("0xg")
def test_numbers_are_those_of_the_c_library(text: str) -> None:
    libc = ctypes.CDLL(None, use_errno=True)
    libc.strtoll.restype = ctypes.c_longlong
    ctypes.set_errno(0)
    value = libc.strtoll(text.encode(), None, 0)
    assert read_number(text) == (None if ctypes.get_errno() else value)


def test_the_defaults_of_nccl_2_30_7() -> None:
    """Section C of the study, typed; src/*.cc of that release."""
    wanted = {"IB_TIMEOUT": 20, "IB_RETRY_CNT": 7, "IB_GID_INDEX": -1, "IB_QPS_PER_CONNECTION": 1, "IB_SPLIT_DATA_ON_QPS": 0,
              "IB_PCI_RELAXED_ORDERING": 2, "IB_ADAPTIVE_ROUTING": -2, "IB_MERGE_NICS": 1, "IB_TC": -1, "IB_SL": -1, "IB_PKEY": 0,
              "CROSS_NIC": 2, "NVLS_ENABLE": 2, "MNNVL_ENABLE": 2, "CUMEM_ENABLE": -2, "DMABUF_ENABLE": 1, "GDRCOPY_ENABLE": 0,
              "RAS_ENABLE": 1, "IB_RESILIENCY_PORT_FAILOVER": 0, "P2P_NET_CHUNKSIZE": 128 * 1024}
    assert {name: facts().numbers[f"NCCL_{name}"] for name in wanted} == wanted
    assert len(facts().names) > 240 and "NCCL_SOCKET_IFNAME" not in facts().numbers
