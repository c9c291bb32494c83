"""Faster plans of another framework's configuration, as changes of its own keys."""

from collections.abc import Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from itertools import chain, takewhile
from math import inf
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import undivided
from hpc_mp.planner.foreign import Foreign, layout_settings, understood
from hpc_mp.planner.frameworks import framework_named
from hpc_mp.planner.question import KEYS, Question, remedies
from hpc_mp.planner.search import Plan, search
from hpc_mp.planner.step import step_time

MOST, GAIN, SAFE, LARGER = 3, 0.01, 0.95, 16  # plans; share of a step that they save, and of the memory; × the ranks
Better = tuple[Plan, dict[str, Any]]  # a plan, and the keys of the configuration that lead to it; None: without the key


def question_of(foreign: Foreign, base: Question, job: JobSpec) -> Question:
    """Return the question of a configuration's job: what the command line states, and what the file cannot say, stays."""
    says, words = foreign.form["says"], _words(job, base)
    allowed = {key: {*values, str(words[key]).lower()} for key in KEYS
               if "*" not in (values := {} if key in base.stated else says.get(key, {}))}
    return replace(base, spec=job, stated=frozenset(KEYS), allowed=allowed, framework=framework_named(foreign.form["factors"]))


def better(foreign: Foreign, base: Question, question: Question, own: Plan) -> list[Better]:
    """Return plans that fit and are faster than a configuration's own, the fastest first, each by fewer changes than the one
    before. If its own does not fit: those of the first remedy, a key, all keys, the optimizer on the host, or more nodes."""
    fits, ranks, candidates = own.fits(question.machine), question.spec.ranks, list[Better]()
    limit = (1 - GAIN) * own.step.seconds if fits else inf
    free = replace(question, stated=frozenset())
    others = (free.having(**{key: value}) for key, value in foreign.form["also"].items())
    sizes = (variant for variant in remedies(question) if ranks <= variant.spec.ranks <= LARGER * ranks)
    variants = takewhile(lambda variant: variant.spec == question.spec or not (fits or candidates), sizes)
    for variant in chain((other for other in others if other.spec != question.spec), variants):
        with suppress(HpcMpError):  # nothing of it can be launched
            best = search(variant)
            for plan in best.tried if best else ():
                plan = replace(plan, footprints=variant.footprints(plan.layout))
                if plan.step.seconds < limit and max(rank.total for rank in plan.footprints) < SAFE * base.machine.memory:
                    candidates += [(plan, changes) for changes in changes_to(foreign, base, own.job, plan.job)]
    plans = list[Better]()
    for plan, changes in sorted(candidates, key=lambda pair: (pair[0].step.seconds, len(pair[1]))):
        if not plans or len(changes) < len(plans[-1][1]):  # steps of slow ones were only estimated
            step = step_time(plan.layout, base.shape, base.machine, question.framework)
            plans.append((replace(plan, step=step), changes))
    return [(plan, changes) for plan, changes in plans[:MOST] if plan.step.seconds < limit]


def changes_to(foreign: Foreign, base: Question, own: JobSpec, job: JobSpec) -> Iterator[dict[str, Any]]:
    """Yield the changes of a configuration with which it is read as a job that the framework runs, if there are any."""
    file, form, words = {row.key: row.value for row in foreign.answers}, foreign.form, _words(job, base)
    on_nodes = base.having(**{"job.nodes": job.job.nodes})
    before, after = (_keys_about(some, form, file) for some in (_words(own, base), words))
    changes = {key: item for key, item in after.items() if item != before.get(key) and (item != "" or key in file)}
    again = understood({key: item for key, item in (file | changes).items() if item != ""}, form, foreign.overrides)
    refused = (all(words[key] is least if isinstance(least, bool) else words[key] >= least for key, least in layout.items())
               for layout in form["refused"])
    with suppress(HpcMpError):
        settings = layout_settings(again, on_nodes.spec.ranks, on_nodes.spec.job.ranks_per_node, base.shape.layers)
        same = on_nodes.having(**settings).spec
        if undivided(same) == undivided(job) and not any(refused):
            yield {key: None if item == "" else item for key, item in changes.items()}


def _keys_about(words: Mapping[str, Any], form: Mapping[str, Any], file: Mapping[str, Any]) -> dict[str, Any]:
    """Return the keys with which a configuration says a layout in these words; "": without the key."""
    keys = dict[str, Any]()
    for key, values in form["says"].items():
        options = values.get(str(words[key]).lower(), values.get("*", [{}]))
        option = next((row for row in options if all(name in file for name, item in row.items() if item != "")), options[-1])
        keys |= {name: words[item[1:]] if str(item).startswith("$") else item for name, item in option.items()}
    return keys


def _words(job: JobSpec, base: Question) -> dict[str, Any]:
    """Return the words of ``foreign.toml`` about a layout."""
    p, shape, samples, piped = job.parallel, base.shape, job.microbatch_size, job.parallel.pipeline > 1
    return {**p.model_dump(), "offload": " ".join(p.offload) if p.offload != "none" else "none", "data": job.data_degree,
            "microbatches": job.microbatches, "samples": samples, "layers": -(-shape.layers // job.stages),
            "uneven": shape.layers % job.stages > 0, "uneven_heads": (shape.heads % p.tensor or shape.kv_heads % p.tensor) > 0,
            "piece": samples if piped else "", "local": samples * job.microbatches if piped else samples}
