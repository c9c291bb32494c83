"""What people bring from other trainers: every name and value of the tables is answered with ours, which a job file takes."""

import json
import re
import tomllib
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
from small_job import JOB

import hpc_mp.job.elsewhere
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, resolve
from hpc_mp.job.elsewhere import elsewhere

TABLES = {name: set(field.annotation.model_fields) for name, field in JobSpec.model_fields.items()}
NAMES, OPTIONS, WORDS = elsewhere().names, elsewhere().options, elsewhere().instead
VALUE = [(key, theirs, ours) for key, row in elsewhere().values.items() for theirs, ours in row.items()]


def refusal(table: str, key: str, value: Any) -> HpcMpError:
    """Of a job file that is right but for ``key = value`` in that table; "": before the first table."""
    job = tomllib.loads(JOB)
    (job.setdefault(table, {}) if table else job)[key] = value
    with pytest.raises(HpcMpError) as refused:
        resolve(job, Path("/"))
    return refused.value


def exists(key: str) -> bool:
    table, _, name = key.partition(".")
    return name in TABLES[table]


@pytest.mark.parametrize("ours", dict.fromkeys(NAMES.values()))
def test_a_name_from_elsewhere_is_answered_with_our_key(ours: str) -> None:
    """In the table where ours stands, in another one, and in none."""
    home, _, key = ours.partition(".")
    assert exists(ours)
    for name in (name for name, key_here in NAMES.items() if key_here == ours):
        for table in (home, "notify", ""):
            said = refusal(table, name, 1)
            assert said.value == (f"{table}.{name} = 1" if table else f"{name} = 1") and said.rule == f"is {ours} here"
            assert said.remedy == f"write {key} = … " + ("in its place" if table == home else f"below the line [{home}]")
    written = name.upper().replace("_", "-")  # as on a command line, and as an environment variable
    assert refusal(home, f"--{written}", 1).rule == f"is {ours} here"


@pytest.mark.parametrize("words", sorted(set(WORDS.values())))
def test_a_name_without_one_of_ours_is_answered_in_words(words: str) -> None:
    for name in (name for name, answer in WORDS.items() if answer == words):
        said = refusal("train", name, 1)
        assert (said.value, said.rule, said.remedy) == (f"train.{name} = 1", "is not a key of [train]", words)
    named = re.findall(rf"\b((?:{'|'.join(TABLES)})\.\w+)", words.replace("metrics.jsonl", ""))
    named += [f"{table}.{key}" for key, table in re.findall(r'(\w+) = "\w+" in \[(\w+)\]', words)]
    assert all(map(exists, named)), named


@pytest.mark.parametrize(("key", "theirs", "ours"), VALUE, ids=[f"{key}-{theirs}" for key, theirs, _ in VALUE])
def test_a_value_from_elsewhere_is_answered_with_ours(key: str, theirs: str, ours: Any) -> None:
    """And ours is a value of that key: it is not what a job file with it is refused for, if it is refused at all."""
    table, _, name = key.partition(".")
    given = theirs.upper()  # case does not matter; some are ours but for their case
    said = refusal(table, name, given)
    assert said.value == f"{key} = {given!r}" and said.remedy == f"write {name} = {json.dumps(ours)}"

    job = tomllib.loads(JOB)
    job.setdefault(table, {})[name] = ours
    try:
        resolve(job, Path("/"))
    except HpcMpError as refused:
        assert " must be " not in f" {refused.rule}" and "is not a schedule" not in refused.rule, refused


def test_no_name_stands_twice_or_is_one_of_ours() -> None:
    """A second row would never be read, nor would one for a name that one of our tables has."""
    table = tomllib.loads((Path(hpc_mp.job.elsewhere.__file__).with_suffix(".toml")).read_text(encoding="utf-8"))
    counted = Counter(" ".join([*table["names"].values(), *(row["names"] for row in table["words"])]).split())
    assert max(counted.values()) == 1 and not counted.keys() & {*TABLES, *(key for keys in TABLES.values() for key in keys)}


def test_what_is_unknown_everywhere_is_not_answered_with_a_key_of_ours() -> None:
    said = refusal("train", "flurbl", 1)
    assert said.rule == "is not a key of [train]" and "write" not in said.remedy
    assert not exists("train.flurbl") and "write" not in refusal("train", "precision", "flurbl").remedy


@pytest.mark.parametrize("name", sorted(OPTIONS))
def test_an_option_of_sbatch_is_answered_with_its_line(name: str) -> None:
    for table in ("slurm", "job", ""):
        said = refusal(table, name, "64G")
        assert said.remedy == f'write extra = {{ {name.replace("_", "-")} = "64G" }} in [slurm]'
    written = said.remedy.removeprefix("write ").removesuffix(" in [slurm]")
    assert tomllib.loads(written) == {"extra": {name.replace("_", "-"): "64G"}}


@pytest.mark.parametrize("table", ["data", "train", ""])
def test_a_dataset_of_the_hub_is_no_file(table: str) -> None:
    said = refusal(table, "dataset", "tatsu-lab/alpaca")
    assert "Hugging Face Hub" in said.rule and 'load_dataset("tatsu-lab/alpaca"' in said.remedy
    assert refusal(table, "dataset", "text/a/*.jsonl").rule == refusal(table, "dataset", "book.txt").rule == "is data.files here"
