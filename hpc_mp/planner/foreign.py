"""Configurations of other frameworks as keys of a job file, with an answer for each of their own keys.

``foreign.toml`` says what keys mean. What depends on the number of GPUs is settled by ``layout_settings``.
"""

import re
import tomllib
from collections.abc import Mapping, Sequence
from functools import cache
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import yaml

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import text_of
from hpc_mp.job.elsewhere import elsewhere
from hpc_mp.job.parallel import Parallel
from hpc_mp.job.spec import Data, Train
from hpc_mp.job.values import leaves, toml_value
from hpc_mp.planner.megatron_script import options

OURS = {name: f"{table.__name__.lower()}.{name}" for table in (Train, Data, Parallel) for name in table.model_fields}
OFF, NOTHING, UNKNOWN = {"none", "null", "false", "0", "-1"}, "no effect on memory or speed", "not known"
ARGUMENTS = "counted as the training arguments' value"
# a setting without effect unless another has at least this value
NEEDS = {"sequence": ("tensor", 2), "context_method": ("context", 2), "parameters on the host": ("zero", 3), **dict.fromkeys(
    ("schedule", "virtual_stages", "layers of a stage", "samples of a pipeline's microbatch"), ("pipeline", 2))}
Pairs = Sequence[tuple[str, Any]]  # keys of a configuration, dotted, and their values


class Row(NamedTuple):
    """Keys of this name and with one of these values (any, if there are none) set something, or count as something."""
    name: re.Pattern[str]
    values: frozenset[str]
    sets: Mapping[str, Any]
    counts: str


class Form(NamedTuple):
    """The configuration of a framework; fields as in ``foreign.toml``."""
    framework: str
    factors: str
    begins: str
    defaults: Mapping[str, Any]
    refused: Sequence[Mapping[str, Any]]
    says: Mapping[str, Mapping[str, Sequence[Mapping[str, Any]]]]


class Tables(NamedTuple):
    """The content of ``foreign.toml``: rows in order, forms, what stands before names, and harmless keys of a job file."""
    rows: tuple[Row, ...]
    forms: tuple[Form, ...]
    before: re.Pattern[str]
    harmless: re.Pattern[str]


class Meaning(NamedTuple):
    """The meaning of a key: its fate if it sets nothing, what it sets, and the place of its row."""
    fate: str = ""
    sets: Mapping[str, Any] = {}
    place: int = 0


class Answer(NamedTuple):
    """The fate of a key: "taken", "no effect on memory or speed", "not known", or "counted as …"; ``ours``: what it sets."""
    key: str
    value: Any
    kind: str
    ours: str


class Foreign(NamedTuple):
    """A configuration. ``settings``: keys of a job file, and in words what ``layout_settings`` resolves."""
    form: Form
    answers: tuple[Answer, ...]
    settings: dict[str, Any]

    @property
    def framework(self) -> str:
        return self.form.framework


@cache
def tables() -> Tables:
    sections = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
    names, forms = sections.pop("names"), sections.pop("forms")
    rows = [Row(re.compile(name.replace(".", r"\.").replace("*", ".*")), frozenset(filter(None, values.split("|"))),
                group.get("sets", {}), group.get("counts", ""))
            for section in sections.values() for group in section
            for name, _, values in (key.partition("=") for key in group["keys"].split())]
    either = {name: "|".join(words.split()) for name, words in names.items()}
    return Tables(tuple(rows), tuple(Form(**form) for form in forms),
                  re.compile(rf"--|(?:(?:{either['tables']})\.)+(?:{either['prefixes']})?|"),
                  re.compile(rf"(?:{either['harmless']})\.(?!{either['harmful']})"))


def read_foreign(path: Path) -> Foreign:
    """Read a configuration. Raises HpcMpError for a file that is unreadable or of no known form, and for an invalid number."""
    text = text_of(path, "configuration")
    try:
        pairs = list(_tree(text).items()) if path.suffix in (".json", ".yaml", ".yml") else options(text)
        form = next(form for form in tables().forms if any(key.startswith((*form.begins.split(),)) for key, _ in pairs))
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError, StopIteration, yaml.YAMLError) as error:
        raise HpcMpError(str(path), "is damaged, or has no keys of DeepSpeed, Megatron-LM, NeMo, transformers or accelerate "
                         f"({' '.join(str(error).split())[:200] or 'none is known'})", "correct it, or name another") from None
    return understood(pairs, form)


def _tree(text: str) -> dict[str, Any]:
    return leaves("", {str(key): value for key, value in yaml.safe_load(text.replace("\t", " ")).items()})


def understood(pairs: Pairs, form: Form) -> Foreign:
    """Return a configuration with the answers for its keys. Raises HpcMpError for an invalid number."""
    meanings, settings = [meaning(key, value) for key, value in pairs], dict(form.defaults)
    for one in sorted(meanings, key=lambda one: one.place):
        settings |= one.sets
    settings = {name: item for name, item in settings.items() if name not in NEEDS or settings.get(NEEDS[name][0], 1) >= NEEDS[name][1]}
    answers = (_answer(key, value, one, settings) for (key, value), one in zip(pairs, meanings, strict=True))
    return Foreign(form, tuple(answers), {OURS.get(name, name): item for name, item in settings.items()})


def _answer(key: str, value: Any, means: Meaning, settings: Mapping[str, Any]) -> Answer:
    """Return the fate of a key, given what all keys together set."""
    left = {name: settings[name] for name in means.sets if name in settings}
    ours = ", ".join(f"{OURS.get(name, name)} = {toml_value(item)}" for name, item in left.items())
    fate = NOTHING if not left else "taken" if left == means.sets else f"counted as {ours}"
    return Answer(key, value, means.fate or fate, ours)


def meaning(key: str, value: Any) -> Meaning:
    """Return the meaning of a key with this value. Raises HpcMpError for an invalid number."""
    name, words = tables().before.sub("", key, 1).replace("-", "_"), _words(value)
    rows = [(place, row) for place, row in enumerate(tables().rows) if row.name.fullmatch(name)]
    if not rows:
        return Meaning(NOTHING if _harmless(name) else UNKNOWN)
    if words == ["auto"] and rows[0][1].sets:
        return Meaning(ARGUMENTS if key.startswith("deepspeed") else UNKNOWN)
    fitting = [(place, row) for place, row in rows if _takes(row, words)][:len(words)]
    if not fitting:
        return Meaning(NOTHING if OFF.issuperset(words) else UNKNOWN)
    sets = {name: _setting(key, name, item, words) for _, row in fitting for name, item in row.sets.items()}
    if None in sets.values():
        return Meaning(UNKNOWN)
    place, first = fitting[0]
    return Meaning("" if sets else f"counted as {first.counts}" if first.counts else NOTHING, sets, place)


def _words(value: Any) -> list[str]:
    """Return the words of a value, in lower case."""
    return [str(word).lower() for word in (value if isinstance(value, list) else str(value).split())] or ["none"]


def _harmless(name: str) -> bool:
    """Return True for a key that other trainers have too, and that changes neither memory nor speed."""
    last = name.rpartition(".")[2]
    return tables().harmless.match(elsewhere().names.get(last) or OURS.get(last, "")) is not None


def _takes(row: Row, words: Sequence[str]) -> bool:
    """Return True if a row is for one of these words. A variable that a script does not set counts as empty."""
    if not row.values:
        return not OFF.issuperset(words)
    return not row.values.isdisjoint((*words, "*", *(["true"] if words[0].startswith("$") else [])))


def _setting(key: str, name: str, item: Any, words: Sequence[str]) -> Any:
    """Return what a key sets a name to; None if its word is not known. Raises HpcMpError if a number is needed."""
    if item != "*":
        return item.replace("*", words[0]) if isinstance(item, str) else item
    word, ours = " ".join(words), elsewhere().values.get(OURS.get(name, ""), {})
    if word in ours or word in ours.values():
        return ours.get(word, word)
    if word.isdecimal() and len(word) < 10:
        return int(word)
    if not ours:
        raise HpcMpError(f"{key} = {word}", "must be a whole number", "write the number in its place")
    return None


def layout_settings(foreign: Foreign, ranks: int, ranks_per_node: int, layers: int) -> dict[str, Any]:
    """Return the settings of a job on so many ranks. Raises HpcMpError if no batch is stated, or a number does not divide."""
    made: dict[str, Any] = {"parallel.tensor": 1, "parallel.pipeline": 1, "parallel.context": 1} | foreign.settings
    axes = {axis: made[f"parallel.{axis}"] for axis in ("tensor", "pipeline", "context")}
    data, samples = max(1, ranks // prod(axes.values())), made.get("samples of a pipeline's microbatch",
                                                                    made.get("samples of a microbatch", 0))
    batch = made.get("train.global_batch", samples * made.get("parallel.microbatches", 1) * data)
    if not batch:
        raise HpcMpError(f"the configuration of {foreign.framework}", "states no batch size",
                         "add the batch sizes to the file, or name the batch: --global-batch 64")
    count = made.get("parallel.microbatches", max(1, batch // (data * samples)) if samples else 1)
    made |= {"train.global_batch": batch, "parallel.microbatches": count}
    _check_product("ranks", ranks, {"data": data} | axes)
    _check_product("the global batch", batch, {
        "data": data, "microbatches": count, "microbatch size": samples or batch // (data * count)})
    if "shards within a node" in made:
        made["parallel.shard_degree"] = min(ranks_per_node, data * axes["context"])
    if "layers of a stage" in made:
        made["parallel.virtual_stages"] = -(-layers // (made["layers of a stage"] * axes["pipeline"]))
    if made.get("parallel.recompute") == "every-1":
        made["parallel.recompute"] = "full"
    made["parallel.offload"] = [name for name in ("optimizer", "parameters") if f"{name} on the host" in made] or "none"
    return {key: item for key, item in made.items() if "." in key}


def _check_product(what: str, size: int, factors: Mapping[str, int]) -> None:
    """Raise HpcMpError, with the arithmetic, unless a number is the product of these."""
    if size != prod(factors.values()):
        product = " × ".join(f"{name}({factor})" for name, factor in factors.items())
        raise HpcMpError(f"{what} = {size}", f"is not {product} = {prod(factors.values())}", "choose numbers that divide")
