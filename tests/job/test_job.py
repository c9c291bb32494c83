"""The job file: what is wrong with it is said in one paragraph, what is right survives being written and a launch's choices."""

import os
import re
import subprocess
import sys
import tomllib
from collections.abc import Callable, Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from small_job import JOB

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import main
from hpc_mp.job import JobSpec, dump_job, load_job, load_resolved, resolve
from hpc_mp.job.resolution import Resolution, ResolvedKey, resolved

ROOT = Path(__file__).resolve().parents[2]
# What stands in mistakes.toml, and what is too long for it.
MISTAKES: dict[str, list[str]] = tomllib.loads(Path(__file__).with_name("mistakes.toml").read_text(encoding="utf-8")) | {
    "10**400": ["steps = 10", f"steps = 1{'0' * 400}", "train.steps = 100000", "does not fit into 64 bits", "smaller"],
    "24000 bits": ["steps = 10", f"steps = 0x{'f' * 6000}", "(a whole number of 24000 bits)", "not fit into 64 bits", "smaller"],
    "5000 digits": ["steps = 10", f"steps = {'1' * 5000}", "job.toml", "thousands of digits", "smaller"],
    "endless path": ['["text.txt"]', f'["{"a" * 300}"]', "data.files[0] = 'aaaa", "longer than 255 bytes", "as ls prints it"],
    "deep tables": ['DEBUG = "WARN" }\n', f'DEBUG = "WARN" }}\n[a{".a" * 3000}]', "a.a.a.a…", "deeper than 32 levels", "fewer"],
    "deep lists": ["steps = 10", f"steps = {'[' * 50}{']' * 50}", "train.steps[0][0]…", "deeper than 32 levels", "fewer levels"],
    "bottomless lists": ["steps = 10", f"steps = {'[' * 9999}{']' * 9999}", "job.toml", "is nested too deeply", "fewer levels"]}

Answer = Callable[..., tuple[int, str, str]]


@pytest.fixture
def here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A directory with a text to train on, and a job file that is right."""
    (tmp_path / "text.txt").write_text("text\n" * 100)
    (tmp_path / "job.toml").write_text(JOB)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delenv("HPC_MP_DEBUG", raising=False)
    return tmp_path


@pytest.fixture
def answer(here: Path, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]) -> Answer:
    """The real command line in this process: exit code, stdout, stderr."""
    def run(*arguments: str) -> tuple[int, str, str]:
        monkeypatch.setattr(sys, "argv", ["hpc-mp", "launch", "job.toml", "--dry-run", "--on", "local", *arguments])
        with pytest.raises(SystemExit) as ended:
            main()
        return int(ended.value.code or 0), *capfd.readouterr()

    return run


def check_message(code: int, out: str, err: str, *parts: str) -> None:
    """Exit 2, nothing on stdout, and one paragraph that has the parts in their order and reads well."""
    assert (code, out) == (2, ""), err
    assert err.startswith("hpc-mp: ") and err.endswith((".\n", "?\n")) and err.count("\n") == 1, err
    rest = err.lower()  # a remedy begins with a capital in the message
    for part in map(str.lower, parts):
        assert part in rest, f"{part!r} not in {rest!r}"
        rest = rest.partition(part)[2]
    assert len(err) < 1000
    assert not re.search(r"\.\.$|\. \.|[Tt]raceback|pydantic|[Ii]nput should", err)


def test_the_job_is_right_before_it_is_spoilt(answer: Answer) -> None:
    code, _, err = answer()
    assert code == 0, err


@pytest.mark.parametrize("mistake", MISTAKES)
def test_a_mistake_is_answered_with_value_rule_and_remedy(here: Path, answer: Answer, mistake: str) -> None:
    old, new, *parts = MISTAKES[mistake]
    assert JOB.count(old) == 1
    (here / "job.toml").write_text(JOB.replace(old, new))
    check_message(*answer(), *parts)


@pytest.mark.parametrize(("content", "rule"), [
    (b"\xff\xfej\x00o\x00b\x00", "is not UTF-8 text"),
    (JOB.encode() + b"\x00", "is not valid TOML"),
    (b"\x7fELF\x01\x02", "is not valid TOML")])
def test_a_file_that_is_no_job(here: Path, answer: Answer, content: bytes, rule: str) -> None:
    (here / "job.toml").write_bytes(content)
    check_message(*answer(), rule)


@pytest.mark.parametrize(("config", "rule"), [
    ("{", "its config.json is not JSON"),
    ("[" * 100_000, "its config.json is not JSON"),
    ("[]", "its config.json names no model_type"),
    ('{"model_type": 5}', "its config.json names no model_type"),
    ('{"model_type": "gpt2"}', "holds no *.safetensors file")])
def test_a_checkpoint_that_is_none(here: Path, answer: Answer, config: str, rule: str) -> None:
    (here / "job.toml").write_text(JOB.replace("config = {", 'pretrained = "model"\n#'))
    (here / "model").mkdir()
    (here / "model" / "config.json").write_text(config)
    check_message(*answer(), f"model.pretrained = {here / 'model'}", rule, "save")


OVERRIDES = tomllib.loads(Path(__file__).with_name("overrides.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("override", "parts"), [
    *OVERRIDES["wrong"].items(),
    ("train.steps=" + "[" * 9999, ("train.steps = '[[[", "must be a whole number", "write")),
    ("train.steps=" + "1" * 5000, ("train.steps = '111", "must be a whole number", "write"))], ids=lambda value: str(value)[:40])
def test_an_override_that_is_wrong(answer: Answer, override: str, parts: Sequence[str]) -> None:
    check_message(*answer(f"--set={override}"), *parts)


@pytest.mark.parametrize("override", OVERRIDES["right"])
def test_an_override_takes_its_place(here: Path, override: str) -> None:
    key, value = OVERRIDES["right"][override]
    section, name = key.split(".")
    found = getattr(getattr(load_job(here / "job.toml", [override]), section), name)
    assert (list(found) if isinstance(found, tuple) else found) == value


def test_the_last_override_wins_and_the_mistake_is_the_last_ones(here: Path) -> None:
    assert load_job(here / "job.toml", ["train.steps=2", "train.steps=3"]).train.steps == 3
    with pytest.raises(HpcMpError, match=r"train\.steps = 0"):
        load_job(here / "job.toml", ["train.steps=2", "train.steps=0"])


def test_the_process_ends_with_2_and_a_traceback_only_for_developers(here: Path) -> None:
    (here / "job.toml").write_text(JOB.replace("steps = 10", "steps = 0"))
    arguments = [sys.executable, "-m", "hpc_mp", "launch", str(here / "job.toml"), "--dry-run", "--on", "local"]
    for debug, traceback in (("0", False), ("1", True)):
        done = subprocess.run(arguments, cwd=ROOT, env=os.environ | {"HPC_MP_DEBUG": debug}, capture_output=True, text=True,
                              timeout=60)
        assert ("Traceback" in done.stderr) == traceback
        assert "train.steps = 0" in done.stderr
        assert traceback or done.returncode == 2


@pytest.mark.parametrize("slurm", ['conda = "/opt/env"', 'conda = "e"\npython = "/opt/python"', 'conda = "e"\nvenv = "/opt/v"'])
def test_an_environment_whose_place_is_known_may_be_staged(here: Path, slurm: str) -> None:
    (here / "job.toml").write_text(JOB.replace('setup = ["true"]\n[environment]\n', f"{slurm}\n[environment]\nstage = true\n"))
    assert load_job(here / "job.toml").environment.stage


def test_the_job_of_a_run_is_parsed_once_while_it_does_not_change(here: Path) -> None:
    path = here / "job.toml"
    first = load_resolved(path)
    assert load_resolved(path) is first
    path.write_text(path.read_text() + "\n# changed\n")
    assert load_resolved(path) is not first and load_resolved(path) == first
    path.unlink()
    with pytest.raises(HpcMpError, match="cannot be read"):
        load_resolved(path)


def test_a_byte_order_mark_is_no_mistake(here: Path) -> None:
    (here / "job.toml").write_text(JOB, encoding="utf-8-sig")
    assert load_job(here / "job.toml").job.name == "small"


# --- paths and defaults --------------------------------------------------------------------------------------------


def test_paths_are_seen_from_the_file(here: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (here / "sub").mkdir()
    (here / "sub" / "job.toml").write_text(JOB.replace('["text.txt"]', '["../a.txt", "/b.txt", "~/c.txt"]'))
    monkeypatch.setenv("HOME", "/home-of-a-test")
    spec = load_job(Path("sub/job.toml"))
    assert spec.data.files == (f"{here}/sub/../a.txt", "/b.txt", "/home-of-a-test/c.txt")
    assert spec.job.directory == f"{here}/sub/runs"


@pytest.mark.parametrize("key", ["data.tokenizer", "data.template", "checkpoint.resume", "lora.pretrained"])
def test_a_path_is_seen_from_the_file(here: Path, key: str) -> None:
    section, _, name = key.partition(".")
    assert getattr(getattr(load_job(here / "job.toml", [f"{key}=there/it"]), section), name) == f"{here}/there/it"


@given(st.integers(1, 200), st.integers(1, 6), st.integers(1, 4))
def test_the_default_microbatches_are_the_most_that_divide(per_replica: int, pipeline: int, data: int) -> None:
    spec = resolve({
        "job": {"ranks_per_node": pipeline * data}, "model": {"config": {"model_type": "gpt2"}},
        "data": {"files": ["a"], "sequence_length": 1}, "parallel": {"pipeline": pipeline},
        "train": {"steps": 1, "global_batch": per_replica * data},
    }, Path("/"))
    divisors = [m for m in range(1, per_replica + 1) if per_replica % m == 0 and m <= 4 * pipeline]
    assert spec.microbatches == (max(divisors) if pipeline > 1 else 1)
    assert spec.microbatches * spec.microbatch_size * data == spec.train.global_batch


@pytest.mark.parametrize("pipeline", [1, 2])
@pytest.mark.parametrize(("ranks", "batch", "microbatches"), [(1, 2, 2), (8, 1, 1)])
def test_a_job_written_in_python_can_be_shown_before_its_arithmetic_is_checked(
        pipeline: int, ranks: int, batch: int, microbatches: int) -> None:
    spec = JobSpec.model_validate({
        "job": {"ranks_per_node": ranks}, "model": {"config": {"model_type": "gpt2"}},
        "data": {"files": ["a"], "sequence_length": 1}, "parallel": {"pipeline": pipeline},
        "train": {"steps": 1, "global_batch": batch}})
    assert f"microbatches = {microbatches if pipeline > 1 else 1}" in dump_job(spec)


def test_a_large_batch_takes_no_time(here: Path) -> None:
    assert load_job(here / "job.toml", [f"train.global_batch={2**62}"]).microbatches == 8


@pytest.mark.parametrize("value", ["1", "two words", '"1"', "1.5"])
def test_variables_of_the_command_line_need_no_quotes(here: Path, value: str) -> None:
    """A shell takes them away."""
    assert load_job(here / "job.toml", [f"environment.set.X={value}"]).environment.set["X"] == value.strip('"')


# --- the choices of a launch are applied to the job once, and nothing else of it changes -----------------------------


def spec_of(**tables: object) -> JobSpec:
    return resolve({"model": {"config": {"model_type": "gpt2", "n_layer": 4}}, "data": {"files": ["x"], "sequence_length": 8},
                    "train": {"steps": 1, "global_batch": 8}, **tables}, Path("/"))


RESOLUTION = Resolution(
    ResolvedKey("job.device", "cuda", "as the partition has it"), ResolvedKey("slurm.gpu_request", "gres"),
    ResolvedKey("slurm.gpu_type", None), ResolvedKey("slurm.extra.exclude", "n[1-2]", "avoided: n1, n2"),
    ResolvedKey("environment.profile", None), ResolvedKey("parallel.partition", (1, 3), "stages of equal cost"),
    ResolvedKey("parallel.tensor_modules", ("*",)), ResolvedKey("parallel.reduce", "step"),
    ResolvedKey("parallel.order", "DPT", "one node"),
    ResolvedKey("train.lr_schedule", "constant"))


def test_every_choice_reaches_its_key_and_nothing_else_changes(tmp_path: Path) -> None:
    given = spec_of(job={"ranks_per_node": 2}, parallel={"pipeline": 2}, slurm={"extra": {"mem": "0"}, "partition": "gpu"})
    chosen = resolved(given, RESOLUTION.keys)
    assert (chosen.job.device, chosen.slurm.gpu_request, chosen.parallel.order) == ("cuda", "gres", "DPT")
    assert chosen.slurm.extra == {"mem": "0", "exclude": "n[1-2]"} and chosen.parallel.partition == (1, 3)
    assert given.job.device == "auto" and given.slurm.extra == {"mem": "0"}, "the job as it was given is another one"
    changed = {each.key for each in RESOLUTION.keys}
    for section in JobSpec.model_fields:
        for key in type(getattr(given, section)).model_fields:
            if not any(name.startswith(f"{section}.{key}") for name in changed):
                assert getattr(getattr(chosen, section), key) == getattr(getattr(given, section), key)
    (tmp_path / "job.toml").write_text(dump_job(chosen))
    assert load_job(tmp_path / "job.toml").parallel.partition == (1, 3), "another release cuts the layers alike"


def test_the_document_holds_what_was_chosen_with_its_reason_and_a_job_no_more() -> None:
    assert resolved(spec_of(), [ResolvedKey("slurm.extra.exclude", None)]).slurm.extra == {}
    document = RESOLUTION.document()
    assert [each["key"] for each in document] == ["job.device", "slurm.extra.exclude", "parallel.partition", "parallel.order"]
    assert document[0] == {"key": "job.device", "value": "cuda", "why": "as the partition has it"}
