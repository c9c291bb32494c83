"""CC7xx: the project's own files, where its directory is given."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator
from itertools import pairwise

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.clouds.azure.context import Case
from hpc_mp.clouds.azure.project import InitScript, Project, Reference, Spec, reference
from hpc_mp.clouds.azure.tree import Attribute
from hpc_mp.clouds.azure.vocabulary import meant

_AZURES = ("slurm", "healthagent", "monitoring")  # projects that cyclecloud/ holds and clusters of Slurm use
_TYPES = ("application", "scheduler", "")
_PIP = re.compile(r"^[^#\n]*\b(?:pip3?|uv pip|conda|mamba)\s+install\b(?:\\\n|.)*?(\b(?:torch|transformers|jax|vllm)\b|-r\s+\S+)",
                  re.MULTILINE)
_FILE = re.compile(r"\$\{?CYCLECLOUD_SPEC_PATH(?::?-[^}]*)?\}?/files/([\w./-]*[\w-])")
_SHEBANG = re.compile(r"#![ \t]*/\S")
_FOLDERS = ("scripts", "files", "tests")
_BACKUP = re.compile(r".*(~|\.(?:bak|orig|swp|rej|old|tmp))|#.*#|\..*")


def _scripts(case: Case) -> Iterator[tuple[Spec, InitScript]]:
    for spec in case.project.specs if case.project else ():
        yield from ((spec, script) for script in spec.scripts if not script.name.casefold().startswith("readme"))


def _of_scripts(wrong: Callable[[InitScript], bool]) -> Callable[[Case], Iterable[Hit]]:
    return lambda case: (Hit(1, script.name, file=script.file) for _, script in _scripts(case) if wrong(script))


def _own(case: Case) -> Iterator[tuple[Project, Reference]]:
    """The references to specs of this project."""
    name = case.project.value("name").casefold() if case.project else ""
    for section in case.sections if case.project and name else ():
        found = reference(section) if section.kind.casefold() == "cluster-init" else None
        if case.project and found and found.project.casefold() == name:
            yield case.project, found


def _of_ini(case: Case, kind: str) -> Iterator[tuple[Project, Attribute]]:
    """The attributes of a section of project.ini."""
    section = case.project.section(kind) if case.project else None
    for each in section.attributes if section else ():
        if case.project:
            yield case.project, each


def _no_ini(case: Case) -> Iterable[Hit]:
    if case.project and case.project.ini is None:
        yield Hit(1, file=case.project.ini_file)


def _ini(case: Case) -> Iterable[Hit]:
    project = case.project
    if project is None or project.ini is None:
        return
    section = project.section("project")
    if section is None:
        yield Hit(1, "no [project]", file=project.ini_file)
        return
    for key in ("name", "version"):
        if not project.value(key):
            yield Hit(section.line, f"no {key} in [project]", file=project.ini_file)


def _ini_type(case: Case) -> Iterable[Hit]:
    for project, each in _of_ini(case, "project"):
        if each.key == "type" and each.raw.strip("\"'").casefold() not in _TYPES:
            yield Hit(each.line, each.raw, file=project.ini_file)


def _no_spec(case: Case) -> Iterable[Hit]:
    for project, found in _own(case):
        if found.spec not in project.names:
            yield Hit(found.line, found.spec, ", ".join(project.names) or "none")


def _misspelt(case: Case) -> Iterable[Hit]:
    own = case.project.value("name") if case.project else ""
    for section in case.sections:
        found = reference(section) if section.kind.casefold() == "cluster-init" else None
        known = _AZURES if section.name.casefold().startswith("cyclecloud/") else tuple(filter(None, (own,)))
        if found and (near := meant(found.project, known, 0.8)):
            yield Hit(found.line, found.project, near)


def _version(case: Case) -> Iterable[Hit]:
    for project, found in _own(case):
        if found.version[:1].isalnum() and project.value("version") and found.version != project.value("version"):
            yield Hit(found.line, f"{found.project}:{found.spec}:{found.version}", project.value("version"))


def _no_init(case: Case) -> Iterable[Hit]:
    for spec in case.project.specs if case.project else ():
        if case.project and spec.is_empty and spec.name not in case.project.declared:
            yield Hit(1, spec.name, file=spec.file)


def _folders(case: Case) -> Iterable[Hit]:
    for spec in case.project.specs if case.project else ():
        for name in spec.folders:
            right = next((each for each in _FOLDERS if each == name.casefold() != name), meant(name, _FOLDERS))
            if right:
                yield Hit(1, name, right, spec.file)


def _not_used(case: Case) -> Iterable[Hit]:
    used = {found.spec for _, found in _own(case)}
    for spec in case.project.specs if case.project and case.project.value("name") else ():
        if spec.name not in used | {"default"}:
            yield Hit(1, spec.name, file=spec.file)


def _no_shebang(script: InitScript) -> bool:
    return not script.name.endswith((".bat", ".ps1", ".cmd")) and not _SHEBANG.match(script.text)


def _order(case: Case) -> Iterable[Hit]:
    for spec in case.project.specs if case.project else ():
        numbered = [(script, found[0]) for script in spec.scripts if (found := re.match(r"\d+", script.name))]
        for (before, one), (after, other) in pairwise(numbered):
            if int(one[:9]) > int(other[:9]):
                yield Hit(1, before.name, after.name, before.file)


def _same_number(case: Case) -> Iterable[Hit]:
    for spec in case.project.specs if case.project else ():
        scripts = [script for script in spec.scripts if not script.name.casefold().startswith("readme")]
        bare = [script for script in scripts if not re.match(r"\d", script.name)]
        if 0 < len(bare) < len(scripts):
            yield from (Hit(1, script.name, file=script.file) for script in bare)


def _blobs(case: Case) -> Iterable[Hit]:
    for project, each in _of_ini(case, "blobs"):
        for name in (part.strip() for part in each.raw.split(",")) if each.key == "files" else ():
            if name and name not in project.blobs:
                yield Hit(each.line, name, file=project.ini_file)


def _missing_file(case: Case) -> Iterable[Hit]:
    for spec, script in _scripts(case):
        for found in _FILE.finditer(script.text):
            is_comment = script.text[:found.start()].rpartition("\n")[2].lstrip().startswith("#")
            if found[1] not in spec.files and not is_comment:
                yield Hit(script.text[:found.start()].count("\n") + 1, found[1], spec.name, script.file)


def _installs(case: Case) -> Iterable[Hit]:
    for _, script in _scripts(case):
        for found in _PIP.finditer(script.text):
            yield Hit(script.text[:found.start(1)].count("\n") + 1, found[1], file=script.file)


RULES: tuple[Rule[Case], ...] = (
    Rule("CC701", "error", _no_ini, "There is no project.ini: cyclecloud project upload refuses the directory.",
         "Make one with [project], name, version and type (cyclecloud project init does)."),
    Rule("CC702", "error", _ini, "project.ini has {it}: the project cannot be uploaded.",
         "Add it: [project] with name = … and version = 1.0.0."),
    Rule("CC703", "warning", _ini_type, "type = {it} is no type of project.", "Write application or scheduler."),
    Rule("CC704", "error", _no_spec, "The project has no spec {it} (it has: {advice}): the node stops while it starts.",
         "Make specs/{it}/cluster-init, or name a spec that exists."),
    Rule("CC705", "warning", _version,
         "{it} is asked for, and the project here is version {advice}: the node runs other scripts than these, or finds none.",
         "Write {advice}, or leave the version out for the newest."),
    Rule("CC706", "warning", _no_init,
         "The spec {it} has no cluster-init or chef with files, and no run_list in project.ini: it does nothing.",
         "Put scripts into specs/{it}/cluster-init/scripts, or delete it."),
    Rule("CC707", "info", _not_used, "No cluster-init of the template names the spec {it}.",
         "Add [[[cluster-init PROJECT:{it}]]] to a node, or delete the spec."),
    Rule("CC708", "error", _of_scripts(lambda script: not _BACKUP.fullmatch(script.name) and _no_shebang(script)),
         "{it} does not begin with #! and the path of a program, so the kernel does not know what to run it with.",
         "Begin it with #!/bin/bash, with nothing before it, no mark of the byte order either."),
    Rule("CC709", "warning", _of_scripts(lambda script: not script.executable and not _BACKUP.fullmatch(script.name)),
         "{it} is not executable: it runs only because CycleCloud sets the mode of what it downloads, and nowhere else.",
         "chmod +x it, and git update-index --chmod=+x."),
    Rule("CC710", "error", _of_scripts(lambda script: "\r\n" in script.text),
         "{it} has line ends of Windows: the kernel looks for an interpreter called \"bash\\r\".",
         "Save it with Unix line ends (sed -i 's/\\r$//')."),
    Rule("CC711", "warning", _order, "{it} runs before {advice}: scripts run in the order of letters, not of numbers.",
         "Give all numbers as many digits: 05, 10."),
    Rule("CC712", "info", _same_number, "{it} has no number in front: it runs after all scripts that have one.",
         "Name it NN-{it}, with the place where it belongs."),
    Rule("CC713", "warning", _of_scripts(lambda script: bool(_BACKUP.fullmatch(script.name))),
         "{it} looks like a backup or a hidden file, and is uploaded and run like any other.",
         "Delete it."),
    Rule("CC714", "error", _blobs, "{it} is listed in [blobs], and is not in blobs/: the upload fails.",
         "Put the file there, or take it off the list."),
    Rule("CC715", "error", _missing_file, "The script reads files/{it}, and the spec {advice} has no such file.",
         "Put it into cluster-init/files, or correct the path."),
    Rule("CC716", "warning", _installs,
         "Every node installs {it} while it starts: that takes minutes of the 30 that Slurm waits, and fails with the network.",
         "Install once, on /shared or in the image."),
    Rule("CC717", "warning", _misspelt,
         "cluster-init of the project {it}, whose name looks like a misspelling: the node stops while it starts.",
         "Write {advice}."),
    Rule("CC718", "warning", _folders,
         "cluster-init has a folder {it}, which CycleCloud does not look into: what is in it is neither run nor found.",
         "Name it {advice}."),
)
