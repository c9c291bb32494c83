"""The choices of a launch are applied to the job once, and nothing else of it changes."""

from __future__ import annotations

from pathlib import Path

from hpc_mp.job import JobSpec, dump_job, load_job, resolve
from hpc_mp.job.resolution import Resolution, ResolvedKey, resolved


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


def test_an_option_that_is_not_chosen_is_not_there() -> None:
    assert resolved(spec_of(), [ResolvedKey("slurm.extra.exclude", None)]).slurm.extra == {}


def test_the_document_holds_what_was_chosen_with_its_reason() -> None:
    document = RESOLUTION.document()
    assert [each["key"] for each in document] == ["job.device", "slurm.extra.exclude", "parallel.partition", "parallel.order"]
    assert document[0] == {"key": "job.device", "value": "cuda", "why": "as the partition has it"}
