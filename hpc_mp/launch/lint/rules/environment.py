"""HM6xx: variables of NCCL, PyTorch and CUDA. The facts are data, in ``env/``."""

from __future__ import annotations

import difflib
import functools
import re
import tomllib
from collections.abc import Iterable, Iterator
from typing import Any

from hpc_mp.assets import asset
from hpc_mp.launch.lint.finding import Hit, Rule
from hpc_mp.launch.lint.script import Script
from hpc_mp.launch.lint.shell import Assignment

NCCL = "env/nccl-variables.toml"
HARMFUL = "env/harmful-variables.toml"
CLOSE = 0.8  # how alike two names are when one is taken for a slip of the other
INTERFACES = ("NCCL_SOCKET_IFNAME", "GLOO_SOCKET_IFNAME", "UCX_NET_DEVICES")
FOR_PROGRAMS = re.compile(r"(NCCL|TORCH_NCCL|UCX|GLOO|FI|OMP|HF)_[A-Z0-9_]+|MASTER_(ADDR|PORT)|WORLD_SIZE|PYTHONPATH")
_ONE_GPU = re.compile(r"\d+|\$\{?(SLURM_LOCALID|LOCAL_RANK|OMPI_COMM_WORLD_LOCAL_RANK)\}?")


@functools.cache
def _facts() -> dict[str, Any]:
    table = tomllib.loads(asset(NCCL).read_text(encoding="utf-8"))
    old = [*table["removed"], *table["legacy"], *table["foreign"]]
    other = tomllib.loads(asset(HARMFUL).read_text(encoding="utf-8"))
    known = {f"NCCL_{name}" for name in table["names"].split()} | set(table["images"])
    return table | other | {"known": known, "read": known | {*old, *other["info"], *other["harmful"]}}


def _exported(script: Script) -> Iterator[Assignment]:
    """What programs see."""
    names = script.shell.exported | {each.name for each in script.shell.assignments if each.exported}
    everything = script.shell_option("a", "allexport") is not None
    return (each for each in script.shell.assignments if everything or each.name in names)


def _listed(script: Script, group: str) -> Iterable[Hit]:
    """Variables that stand in a group of name = what to do."""
    rows = _facts()[group]
    yield from (Hit(each.line, each.name, rows[each.name]) for each in _exported(script) if each.name in rows)


def _removed(script: Script) -> Iterable[Hit]:
    return _listed(script, "removed")


def _legacy(script: Script) -> Iterable[Hit]:
    return _listed(script, "legacy")


def _no_name(script: Script) -> Iterable[Hit]:
    return _listed(script, "foreign")


def _unknown(script: Script) -> Iterable[Hit]:
    table = _facts()
    for each in _exported(script):
        of_plugin = each.name.startswith(tuple(table["plugins"]))
        if each.name.startswith("NCCL_") and each.name not in table["read"] and not of_plugin:
            near = difflib.get_close_matches(each.name, sorted(table["known"]), n=1, cutoff=CLOSE)
            yield Hit(each.line, each.name, f"Did you mean {near[0]}?" if near else "Leave it out.")


def _numbered_level(script: Script) -> Iterable[Hit]:
    levels = _facts()["levels"]
    for each in _exported(script):
        if each.name in levels["names"] and each.value.isdecimal():
            yield Hit(each.line, f"{each.name}={each.value}", levels["words"])


def _debug(script: Script) -> Iterable[Hit]:
    table = _facts()
    vendor = any(each.name == "NCCL_NET" and each.value.startswith(tuple(table["vendor"]["NCCL_NET"]))
                 for each in _exported(script))
    for each in _exported(script):
        values, harm = table["debug"].get(each.name, (None, ""))
        allowed = vendor and each.name in table["vendor"]["allows"]
        if values and re.fullmatch(values, each.value) and not allowed:
            yield Hit(each.line, f"{each.name}={each.value}", harm)


def _hurting(script: Script, group: str) -> Iterable[Hit]:
    """Variables that stand in a group of name = [values, harm, fix] with one of the values."""
    for each in _exported(script):
        values, harm, fix = _facts()[group].get(each.name, (None, "", ""))
        if values and re.fullmatch(values, each.value):
            yield Hit(each.line, f"{each.name}={each.value} {harm}", fix)


def _harmful(script: Script) -> Iterable[Hit]:
    return _hurting(script, "harmful")


def _outdated(script: Script) -> Iterable[Hit]:
    return _hurting(script, "info")


def _one_gpu_in_task(script: Script) -> Iterable[Hit]:
    for each in _exported(script):
        if each.name == "CUDA_VISIBLE_DEVICES" and each.task and _ONE_GPU.fullmatch(each.value):
            yield Hit(each.line, each.value)


def _gpus_of_the_batch_shell(script: Script) -> Iterable[Hit]:
    for each in _exported(script):
        if each.name == "CUDA_VISIBLE_DEVICES" and not each.task and script.steps:
            yield Hit(each.line)


def _loopback(script: Script) -> Iterable[Hit]:
    for each in _exported(script):
        if each.name in INTERFACES and script.nodes > 1 and re.match(r"=?(lo|docker\d*|virbr\d*)\b", each.value):
            yield Hit(each.line, f"{each.name}={each.value}")


def _not_exported(script: Script) -> Iterable[Hit]:
    exported = {each.name for each in _exported(script)}
    for each in script.shell.assignments:
        if FOR_PROGRAMS.fullmatch(each.name) and each.name not in exported and not each.captured \
                and not re.search(rf"\$\{{?{each.name}\b", script.text):
            yield Hit(each.line, each.name)


RULES = (
    Rule("HM601", "warning", _removed,
         "{it} does nothing: NCCL has removed it.",
         "{advice}."),
    Rule("HM602", "info", _legacy,
         "{it} is an old name that NCCL still honours.",
         "{advice}."),
    Rule("HM603", "warning", _no_name,
         "{it} is no variable of NCCL: it does nothing.",
         "{advice}."),
    Rule("HM604", "warning", _unknown,
         "NCCL 2.30 reads no variable {it}.",
         "{advice}"),
    Rule("HM605", "info", _numbered_level,
         "{it}: a number that only old scripts use.",
         "Write the word that is meant: {advice}."),
    Rule("HM606", "warning", _debug,
         "{it} {advice}: a setting for the search of a fault.",
         "Leave it out of production runs."),
    Rule("HM607", "warning", _harmful,
         "{it}.",
         "{advice}."),
    Rule("HM608", "info", _outdated,
         "{it}.",
         "{advice}."),
    Rule("HM609", "warning", _one_gpu_in_task,
         "CUDA_VISIBLE_DEVICES={it} in a task shows it one GPU: no peer-to-peer between ranks, and LOCAL_RANK is no "
         "device number.",
         "Leave it out and choose the device by LOCAL_RANK."),
    Rule("HM610", "info", _gpus_of_the_batch_shell,
         "CUDA_VISIBLE_DEVICES has no effect on steps with GPUs: Slurm sets it anew for each task.",
         "Leave it out; ask for GPUs with --gpus-per-node."),
    Rule("HM611", "error", _loopback,
         "{it}: other nodes cannot be reached through this interface.",
         "Name the interface between the nodes."),
    Rule("HM612", "warning", _not_exported,
         "{it} is set but not exported: no program sees it.",
         "export {it}=…"),
)
