"""Faster plans of another framework's configuration, as changes of its own keys."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, takewhile
from typing import Any, NamedTuple

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import undivided
from hpc_mp.planner.foreign import Foreign, layout_settings, understood
from hpc_mp.planner.frameworks import framework_named
from hpc_mp.planner.search import KEYS, Plan, Question, remedies, search

MOST, GAIN, LARGER, SAFE = 3, 0.01, 16, 0.95  # plans; share of a step that they gain; × the ranks; share of the memory


class Better(NamedTuple):
    """A plan, and the keys of the configuration that lead to it; None: without the key."""
    plan: Plan
    changes: dict[str, Any]


def question_of(foreign: Foreign, base: Question, job: JobSpec) -> Question:
    """Return the question of a configuration's job: keys that the command line states, and those that the file cannot, hold."""
    says, words = foreign.form["says"], _words(job, base.shape.layers)
    fixed = {key for key in KEYS if key in base.stated or "*" not in says.get(key, ())}
    allowed = {key: {*(says.get(key, ()) if key not in base.stated else ()), str(words[key]).lower()} for key in fixed}
    return replace(base, spec=job, stated=frozenset(KEYS), allowed=allowed, framework=framework_named(foreign.form["factors"]))


def better(foreign: Foreign, base: Question, question: Question, own: Plan) -> list[Better]:
    """Return plans that fit and are faster than a configuration's own, the fastest first, each by fewer changes than the one
    before. If its own does not fit, they are those of the first remedy: a key, all keys, the optimizer on the host, more nodes."""
    fits, ranks, found = own.fits(question.machine), question.spec.ranks, list[Better]()
    here = replace(question, stated=frozenset()).having(**{"parallel.offload": "none"})
    asked = takewhile(lambda one: one.spec == question.spec or not (fits or found or one.spec.ranks > LARGER * ranks),
                      (one for one in remedies(question) if one.spec.ranks >= ranks))
    for one in chain([here] * (here.spec != question.spec), asked):
        with suppress(HpcMpError):  # nothing of it can be launched
            best = search(one)
            for plan in best.tried if best else ():
                plan = replace(plan, footprints=one.footprints(plan.layout))
                safe = max(rank.total for rank in plan.footprints) < SAFE * one.machine.memory
                if safe and not (fits and plan.step.seconds > (1 - GAIN) * own.step.seconds):
                    found += [Better(plan, changes) for changes in _changes(foreign, base, own, plan)]
    plans = list[Better]()
    for faster in sorted(found, key=lambda one: (one.plan.step.seconds, len(one.changes))):
        plans += [faster] * (not plans or len(faster.changes) < len(plans[-1].changes))
    return plans[:MOST]


def _changes(foreign: Foreign, base: Question, own: Plan, plan: Plan) -> Iterator[dict[str, Any]]:
    """Yield the changes of a configuration with which it is read as a plan that the framework runs, if there are any."""
    keys, form, layers = {answer.key: answer.value for answer in foreign.answers}, foreign.form, base.shape.layers
    before, words = _said(form, _words(own.job, layers), keys), _words(plan.job, layers)
    said = _said(form, words, keys)
    changes = {key: item for key, item in said.items() if item != before.get(key) and (item != "" or key in keys)}
    read = understood({key: item for key, item in (keys | changes).items() if item != ""}, form, foreign.given)
    here = base.having(**{"job.nodes": plan.job.job.nodes}).spec
    with suppress(HpcMpError):
        settings = layout_settings(read, here.ranks, here.job.ranks_per_node, layers)
        even = own.job.parallel.partition != "uniform" or len({*plan.layout.layers}) == 1
        refused = (all(words[key] == least if least is False else words[key] >= least for key, least in row.items())
                   for row in form["refused"])
        job = replace(base, spec=here).having(**settings).spec
        if even and not any(refused) and undivided(job) == undivided(plan.job):
            yield {key: None if item == "" else item for key, item in changes.items()}


def _said(form: Mapping[str, Any], words: Mapping[str, Any], keys: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with which a configuration says a layout in these words; "": without the key."""
    said = dict[str, Any]()
    for key, ways in form["says"].items():
        several = ways.get(str(words[key]).lower(), ways.get("*", [{}]))
        way = next((way for way in several if all(name in keys for name, item in way.items() if item != "")), several[-1])
        said |= {name: words[item[1:]] if str(item).startswith("$") else item for name, item in way.items()}
    return said


def _words(job: JobSpec, layers: int) -> dict[str, Any]:
    """Return the words of ``foreign.toml`` about a layout."""
    p, samples = job.parallel, job.microbatch_size
    piece, local = (samples, samples * job.microbatches) if p.pipeline > 1 else ("", samples)
    return {**p.model_dump(), "offload": " ".join(p.offload) if p.offload != "none" else "none", "data": job.data_degree,
            "microbatches": job.microbatches, "samples": samples, "layers": -(-layers // job.stages), "piece": piece, "local": local}
