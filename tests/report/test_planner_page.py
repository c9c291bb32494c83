"""The planner that runs in a browser: its archive, its answers beside those of ``hpc-mp plan``, and the page in a browser."""

import importlib.util
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import partial
from http.server import SimpleHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Event, Thread
from types import ModuleType
from typing import Any
from zipfile import ZipFile

import psutil
import pyodide_folder
import pytest
from browser import PROGRAM, needs_browser
from click.testing import CliRunner

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli

ROOT = Path(__file__).resolve().parents[2]
VARIABLE = "HPC_MP_PYODIDE"
FOLDER = os.environ.get(VARIABLE, "")
needs_pyodide = pytest.mark.skipif(not Path(FOLDER, "pyodide.mjs").is_file(), reason=(
    f"no Pyodide in {VARIABLE}: python tests/support/pyodide_folder.py FOLDER, then {VARIABLE}=FOLDER"))
SMALL = {"config": {"model_type": "gpt2", "n_layer": 8, "n_embd": 2048, "n_head": 16}, "machine": "A100-SXM4-80GB", "nodes": "2",
         "sequence": "1024", "global-batch": "64"}
LARGE = {"config": {"model_type": "llama", "hidden_size": 8192, "intermediate_size": 28672, "num_hidden_layers": 80,
                    "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 128256, "max_position_embeddings": 8192},
         "machine": "H100 80GB HBM3", "nodes": "16", "sequence": "8192", "global-batch": "512"}
REFUSED = LARGE | {"nodes": "2", "keys": "parallel.recompute=none"}
MOST = 3.0  # seconds of an answer


def module(path: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(Path(path).stem, ROOT / "docs" / path)
    assert spec and spec.loader
    made = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(made)
    return made


def by_command(folder: Path, form: dict[str, Any]) -> Any:
    """The document of ``hpc-mp plan --json``, or value, rule and remedy of its refusal."""
    (folder / "config.json").write_text(json.dumps(form["config"]), encoding="utf-8")
    words = [word for name in ("machine", "nodes", "sequence", "global-batch") for word in (f"--{name}", form[name])]
    keys = [word for key in form.get("keys", "").split() for word in ("--set", key)]
    done = CliRunner().invoke(cli, ["plan", "--model", str(folder / "config.json"), "--json", *words, *keys])
    if isinstance(done.exception, HpcMpError):
        return [done.exception.value, done.exception.rule, done.exception.remedy]
    return json.loads(done.output)


def leaves(document: Any, place: str = "") -> Iterator[tuple[str, Any]]:
    """The figures and words of a document, each with its place; of a path, its name."""
    if isinstance(document, dict | list):
        for key, value in document.items() if isinstance(document, dict) else enumerate(document):
            yield from leaves(value, f"{place}/{key}")
    else:
        named = Path(document).name if isinstance(document, str) else document
        yield place, pytest.approx(named, rel=1e-9) if isinstance(named, float) else named


@pytest.fixture(scope="module")
def unpacked(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("archive")
    module("hooks.py").pack(folder / "hpc_mp.zip")
    with ZipFile(folder / "hpc_mp.zip") as packed:
        packed.extractall(folder / "planner")
    return folder


def test_the_archive_suffices_and_answers_as_the_command(unpacked: Path, tmp_path: Path) -> None:
    """Out of the archive alone, in a process without this checkout's rooms."""
    form = SMALL | {"config": json.dumps(SMALL["config"])}
    code = "import answer, hpc_mp, sys; print(hpc_mp.__file__); print(answer.answer(sys.argv[1]))"
    done = subprocess.run([sys.executable, "-c", code, json.dumps(form)], cwd=unpacked / "planner", text=True,
                          capture_output=True)
    assert done.returncode == 0, done.stderr
    where, text = done.stdout.splitlines()
    assert Path(where).is_relative_to(unpacked)
    told = json.loads(text)
    assert told["error"] is None and "fits" in told["page"] and "<svg" in told["page"]
    expected = dict(leaves(by_command(tmp_path, SMALL)))
    assert dict(leaves(told["plan"])).keys() == expected.keys() and len(expected) > 100
    assert {place: value for place, value in leaves(told["plan"]) if expected[place] != value} == {}


def test_refusals_have_value_rule_and_remedy(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_mp.layout.models.reading.find_spec", lambda _: None)  # no transformers, as in a browser
    answer = module("planner/answer.py").answer
    config = json.dumps(SMALL["config"])
    for form, words in (({"config": "{"}, "is not JSON"),
                        ({"config": '{"model_type": "none"}', "machine": "H100"}, "has no table"),
                        ({"config": config, "machine": "H1000"}, "is not a machine"),
                        ({"config": config, "nodes": "two"}, "not a valid integer"),
                        ({"config": config, "machine": "H100", "keys": "parallel.tensor=7", "nodes": "1"}, "")):
        told = json.loads(answer(json.dumps(form)))
        assert len(told["error"]) == 3 and all(told["error"]) and words in told["error"][1], told["error"]
        assert told["plan"] is None


def test_what_the_form_offers() -> None:
    offered = json.loads(module("planner/answer.py").choices())
    assert {"gpt2", "llama", "mixtral"} <= set(offered["types"])
    assert {group for _, group, _ in offered["machines"]} >= {"gpu", "azure", "aws"}
    script = (ROOT / "docs/planner/worker.js").read_text(encoding="utf-8")
    assert f"/v{pyodide_folder.VERSION}/" in script, "the tests' Pyodide is that of the page"
    assert set(re.findall(r'"([\w-]+)"', re.findall(r"PACKAGES = \[(.*?)\]", script)[0])) < {*pyodide_folder.ANY}


@dataclass
class Seen:
    """What a page in a browser told: (name, value, seconds of a processor that its worker had used by then)."""

    told: list[tuple[str, Any, float]] = field(default_factory=list)
    done: Event = field(default_factory=Event)
    process: psutil.Popen | None = None

    def used(self) -> float:
        assert self.process is not None
        threads = [(one.pid, thread) for one in self.process.children(recursive=True) for thread in one.threads()]
        return sum(thread.user_time + thread.system_time for pid, thread in threads
                   if Path(f"/proc/{pid}/task/{thread.id}/comm").read_text(encoding="utf-8").startswith("DedicatedWorker"))


class Server(SimpleHTTPRequestHandler):
    """Files of a folder; what is posted is noted."""

    def __init__(self, seen: Seen, *arguments: Any, **keys: Any) -> None:
        self.seen = seen
        super().__init__(*arguments, **keys)

    def do_POST(self) -> None:
        value = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.seen.told.append((self.path.strip("/"), value, self.seen.used()))
        self.send_response(204)
        self.end_headers()
        if self.path == "/done":
            self.seen.done.set()

    def log_message(self, *_: Any) -> None:
        pass


def driven(site: Path, folder: str, jobs: list[dict[str, Any]], seconds: float) -> list[tuple[str, Any, float]]:
    """What the page tells in a browser, with Pyodide in that folder of the site."""
    assert PROGRAM is not None
    text = Path(__file__).with_name("planner_drive.html").read_text(encoding="utf-8")
    (site / "drive.html").write_text(text.format(folder=folder, jobs=json.dumps(jobs)), encoding="utf-8")
    seen = Seen()
    server = ThreadingHTTPServer(("127.0.0.1", 0), partial(Server, seen, directory=str(site)))
    Thread(target=server.serve_forever, daemon=True).start()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        seen.process = psutil.Popen([PROGRAM, "--headless", "--no-sandbox", "--disable-gpu", "--no-first-run",
                                     "--disable-background-networking",
                                     f"--user-data-dir={profile}", f"http://127.0.0.1:{server.server_port}/drive.html"],
                                    stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
        try:
            assert seen.done.wait(seconds), f"told so far: {seen.told}"
        finally:
            seen.process.terminate()
            seen.process.wait(60)
            server.shutdown()
            server.server_close()
    return seen.told


@pytest.fixture
def site(unpacked: Path, tmp_path: Path) -> Path:
    site = tmp_path / "site"
    shutil.copytree(ROOT / "docs/planner", site, ignore=shutil.ignore_patterns("*.py", "__pycache__"))
    shutil.copy(unpacked / "hpc_mp.zip", site)
    return site


@pytest.mark.prove
@needs_browser
@needs_pyodide
@pytest.mark.timeout(3000)
def test_a_browser_plans_as_the_command_in_three_seconds(site: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """The seconds are those of the worker's thread on a processor: on an idle machine, seconds of the clock."""
    (site / "pyodide").symlink_to(Path(FOLDER).resolve())
    told = driven(site, "pyodide/", [SMALL, LARGE, REFUSED], 2900)
    assert [name for name, *_ in told] == ["loaded", *["asked", "answered"] * 3, "done"]
    assert told[0][1].startswith("Answered in") and told[0][1].endswith("It has a plan."), "the example, as soon as all is loaded"
    answers, took = [value for name, value, _ in told if name == "answered"], [told[n + 1][2] - told[n][2] for n in (1, 3, 5)]
    with capsys.disabled():
        print(f"\nseconds of a processor: {told[0][2]:.1f} until the first plan, then {took}; in the worker, by the clock: "
              f"{[one['seconds'] for one in answers]}")
    for form, answer in zip((SMALL, LARGE), answers, strict=False):
        expected = dict(leaves(by_command(tmp_path, form)))
        assert answer["refusal"] == [] and dict(leaves(answer["plan"])).keys() == expected.keys()
        assert {place: value for place, value in leaves(answer["plan"]) if expected[place] != value} == {}
        assert "fits" in answer["text"] and "Speed over memory" in answer["text"]
    assert answers[2]["plan"] is None and answers[2]["refusal"] == by_command(tmp_path, REFUSED)
    assert "does not fit" in answers[2]["text"]
    for answer in answers:
        assert answer["drawn"] and all(wide > 100 and high > 20 for wide, high in answer["drawn"])
        assert not answer["hidden"] and not answer["overflows"] and answer["ticks"] > 3, "the page did not freeze"
    assert told[0][2] > MOST > max(took[:2]) > 0.1, "and loading takes longer: the thread is the right one"


@pytest.mark.prove
@needs_browser
@pytest.mark.parametrize(("folder", "words"), [
    ("//127.0.0.2/", "must name a folder of this site"), ("pyodide/", "Failed to fetch")])
def test_what_cannot_be_loaded_is_said(site: Path, folder: str, words: str) -> None:
    ((_, said, _), *_) = driven(site, folder, [], 250)
    assert words in said
