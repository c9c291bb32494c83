"""Configurations of other frameworks as keys of a job file, with an answer for each of their own keys, by ``foreign.toml``."""

import re
import tomllib
from collections.abc import Mapping, Sequence
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


class Answer(NamedTuple):
    """The fate of a key: "taken", "no effect on memory or speed", "not known", or "counted as …"; ``ours``: what it sets."""
    key: str
    value: Any
    kind: str
    ours: str


class Foreign(NamedTuple):
    """A configuration of a form in ``foreign.toml``. ``settings``: keys of a job file, and in words what depends on the ranks;
    ``overrides``: keys that hold in place of its own."""
    framework: str
    form: Mapping[str, Any]
    answers: tuple[Answer, ...]
    settings: dict[str, Any]
    overrides: Mapping[str, Any]


TABLES = tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))
NEEDS, NAMES, FORMS = TABLES.pop("needs"), TABLES.pop("names"), TABLES.pop("forms")
ROWS = [(re.compile(name.replace(".", r"\.").replace("*", ".*")), frozenset(filter(None, values.split("|"))), row)
        for section in TABLES.values() for row in section
        for name, _, values in (key.partition("=") for key in row["keys"].split())]  # a name, its values (any if none), its row
GROUPS, PREFIXES, HARMLESS, HARMFUL = ("|".join(NAMES[name].split()) for name in ("tables", "prefixes", "harmless", "harmful"))
BEFORE, WITHOUT_EFFECT = re.compile(rf"--|(?:(?:{GROUPS})\.)+(?:{PREFIXES})?|"), re.compile(rf"(?:{HARMLESS})\.(?!{HARMFUL})")
OURS = {name: f"{table.__name__.lower()}.{name}" for table in (Train, Data, Parallel) for name in table.model_fields}
OFF, NOTHING, UNKNOWN = {"none", "null", "false", "0", "-1"}, "no effect on memory or speed", "not known"


def read_foreign(path: Path, overrides: Mapping[str, Any] | None = None) -> Foreign:
    """Read a configuration. Raises HpcMpError for a file that is unreadable or of no known form, and for an invalid number."""
    text = text_of(path, "configuration")
    try:
        tree = yaml.safe_load(text.replace("\t", " ")) if path.suffix in (".json", ".yaml", ".yml") else dict(options(text))
        pairs = leaves("", {str(key): value for key, value in tree.items()})
        form = next(form for form in FORMS if any(key.startswith((*form["begins"].split(),)) for key in pairs))
    except (ValueError, LookupError, AttributeError, TypeError, RecursionError, StopIteration, yaml.YAMLError) as error:
        raise HpcMpError(str(path), "is damaged, or has no keys of DeepSpeed, Megatron-LM, NeMo, transformers or accelerate "
                         f"({' '.join(str(error).split())[:200] or 'none is known'})", "correct it, or name another") from None
    return understood(pairs, form, overrides or {})


def understood(pairs: Mapping[str, Any], form: Mapping[str, Any], overrides: Mapping[str, Any]) -> Foreign:
    """Return a configuration of these keys, with their answers. Raises HpcMpError for an invalid number."""
    meanings, answers = [meaning(key, value) for key, value in pairs.items()], list[Answer]()
    settings: dict[str, Any] = {**form["defaults"]}
    for _, sets, _ in sorted(meanings, key=lambda one: one[0]):
        settings |= sets
    settings |= {key.rpartition(".")[2]: item for key, item in overrides.items()}
    for name, (axis, least) in NEEDS.items():
        if settings.get(axis, 1) < least:
            settings.pop(name, None)
    for (key, value), (_, sets, fate) in zip(pairs.items(), meanings, strict=True):
        left = {name: settings[name] for name in sets if name in settings}
        ours = ", ".join(f"{OURS.get(name, name)} = {toml_value(item)}" for name, item in left.items())
        taken = NOTHING if not left else "taken" if left == sets else f"counted as {ours}"
        answers.append(Answer(key, value, fate or taken, ours))
    keys = {OURS.get(name, name): item for name, item in settings.items()}
    return Foreign(form["framework"], form, tuple(answers), keys, overrides)


def meaning(key: str, value: Any) -> tuple[int, Mapping[str, Any], str]:
    """Return the place of a key's row, what the key sets, and its fate if it sets nothing. Raises HpcMpError as ``_setting``."""
    name, parts = BEFORE.sub("", key, count=1).replace("-", "_"), value if isinstance(value, list) else str(value).split()
    words = [str(word).lower() for word in parts] or ["none"]
    named = [(place, values, row) for place, (pattern, values, row) in enumerate(ROWS) if pattern.fullmatch(name)]
    if not named:
        harmless = WITHOUT_EFFECT.match(elsewhere().names.get(last := name.rpartition(".")[2]) or OURS.get(last, ""))
        return 0, {}, NOTHING if harmless else UNKNOWN
    if words == ["auto"] and "sets" in named[0][2]:
        return 0, {}, "counted as the training arguments' value" if key.startswith("deepspeed") else UNKNOWN
    off, allowed = OFF.issuperset(words), {*words, "*", *["true"] * words[0].startswith("$")}  # an unset variable counts as empty
    fitting = [(place, row) for place, values, row in named if (values & allowed if values else not off)][:len(words)]
    if not fitting:
        return 0, {}, NOTHING if off else UNKNOWN
    sets = {name: _setting(key, name, item, words) for _, row in fitting for name, item in row.get("sets", {}).items()}
    if None in sets.values():
        return 0, {}, UNKNOWN
    place, row = fitting[0]
    return place, sets, "" if sets else f"counted as {row['counts']}" if "counts" in row else NOTHING


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
    settings: dict[str, Any] = {"parallel.tensor": 1, "parallel.pipeline": 1, "parallel.context": 1} | foreign.settings
    axes = {axis: settings[f"parallel.{axis}"] for axis in ("tensor", "pipeline", "context")}
    data = max(1, ranks // prod(axes.values()))
    samples = settings.get("samples of a pipeline's microbatch", settings.get("samples of a microbatch", 0))
    batch = settings.get("train.global_batch", samples * settings.get("parallel.microbatches", 1) * data)
    if not batch:
        raise HpcMpError(f"the configuration of {foreign.framework}", "states no batch size",
                         "add the batch sizes to the file, or state the batch: --global-batch 64")
    count = settings.get("parallel.microbatches", max(1, batch // (data * samples)) if samples else 1)
    for what, size, factors in (("ranks", ranks, {"data": data} | axes), ("the global batch", batch, {
            "data": data, "microbatches": count, "microbatch size": samples or batch // (data * count)})):
        if size != prod(factors.values()):
            product = " × ".join(f"{name}({factor})" for name, factor in factors.items())
            raise HpcMpError(f"{what} = {size}", f"is not {product} = {prod(factors.values())}", "choose numbers that divide")
    offload = tuple(name for name in ("optimizer", "parameters") if f"{name} on the host" in settings)
    settings |= {"train.global_batch": batch, "parallel.microbatches": count, "parallel.offload": offload or "none"}
    if "shards within a node" in settings:
        settings["parallel.shard_degree"] = min(ranks_per_node, data * axes["context"])
    if "layers of a stage" in settings:
        settings["parallel.virtual_stages"] = -(-layers // (settings["layers of a stage"] * axes["pipeline"]))
    return {key: item for key, item in settings.items() if "." in key} | {**foreign.overrides}
