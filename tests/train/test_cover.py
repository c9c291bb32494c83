"""Features together: a covering set of combinations in which every pair of values of any two features stands, each compared with
one process in fp64, to 1e-12."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import nullcontext
from pathlib import Path
from random import Random
from typing import Any

import pytest
from allpairspy import AllPairs
from exact import EXACT, OWN_ATTENTION, WHOLE_SAMPLES, Engine, Reference, cases
from layouts import MODELS, job, layout

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models import check_layout, read_shape

OFFLOADS = {"none": [], "optimizer": ["optimizer"], "activations": ["activations"], "both": ["optimizer", "activations"],
            "parameters": ["parameters"], "all": ["optimizer", "parameters", "activations"]}
FEATURES: dict[str, list[Any]] = {
    "model": ["gpt2", "gptj", "llama", "llama-tied", "mixtral", "qwen2"],
    "schedule": ["gpipe", "1f1b", "zero_bubble", "interleaved_1f1b", "breadth_first", "zero_bubble_v"],
    "tensor": [1, 2], "sequence": ["false", "true"], "pipeline": [1, 2], "context": [1, 2], "context_method": ["ring", "ulysses"],
    "expert": [1, 2], "data": [1, 2, 4], "zero": [0, 1, 2, 3], "shards": ["all", "half"],
    "reduce": ["microbatch", "step"],
    "recompute": ["none", "full", "selective", "every-2"], "offload": list(OFFLOADS),
    "microbatches": [2, 4, 6], "order": ["DPT", "TPD", "PDT"], "dropout": [0.0, 0.2],
    "capacity": [0.0, 0.75],  # of experts; 0.0 stands for none
    "documents": ["joined", "separate"],
}
SEEDS = range(4)  # with the values in another order most combinations are others
GLOBAL_BATCH = 24  # of the tests' job
QUICK = 3  # of them are in ``make test``


def possible(values: Sequence[Any]) -> bool:
    """Whether some features may stand together; ``values`` are the first of a combination."""
    c = dict(zip(FEATURES, values, strict=False))
    world = c.get("tensor", 1) * c.get("pipeline", 1) * c.get("context", 1) * c.get("data", 1)
    return not any((
        world > 8,
        c.get("sequence") == "true" and c["tensor"] == 1,
        c.get("context", 1) > 1 and c["model"] in WHOLE_SAMPLES,
        c.get("context_method") == "ulysses" and c["context"] == 1,
        c.get("expert", 1) > 1 and c["model"] != "mixtral",
        c.get("expert", 1) > 1 and "data" in c and c["data"] * c["context"] < 2,
        c.get("shards") == "half" and (c["zero"] == 0 or c["data"] < 4),
        c.get("reduce") == "microbatch" and c["zero"] < 2,
        "parameters" in OFFLOADS[c.get("offload", "none")] and c["zero"] < 3,
        # nothing lies between a forward and its backward, so no activation would leave
        "activations" in OFFLOADS[c.get("offload", "none")] and c["pipeline"] == 1 and c["schedule"] in ("1f1b", "zero_bubble"),
        "microbatches" in c and GLOBAL_BATCH % (c["data"] * c["microbatches"]) > 0,
        c.get("recompute") == "selective" and c["model"] in OWN_ATTENTION,
        c.get("capacity", 0.0) > 0 and c["model"] != "mixtral",
    ))


def combinations() -> list[dict[str, Any]]:
    found: dict[tuple[Any, ...], dict[str, Any]] = {}
    for seed in SEEDS:
        shuffled = OrderedDict((name, Random(seed).sample(values, len(values))) for name, values in FEATURES.items())
        for row in AllPairs(shuffled, filter_func=possible):
            found[tuple(row)] = dict(zip(FEATURES, row, strict=True))
    return list(found.values())


def overrides(c: dict[str, Any], disk: Path) -> list[str]:
    """The keys of a job."""
    more: dict[str, Any] = {"order": f'"{c["order"]}"', "context": c["context"], "sequence": c["sequence"], "zero": c["zero"],
                            "expert": c["expert"], "recompute": f'"{c["recompute"]}"', "schedule": c["schedule"],
                            "microbatches": c["microbatches"], "reduce": c["reduce"]}
    if c["schedule"] in ("interleaved_1f1b", "breadth_first"):
        more["virtual_stages"] = 2
    if c["context"] > 1:
        more["context_method"] = f'"{c["context_method"]}"'
        more["order"] = f'"{c["order"].replace("T", "CT")}"'
    if c["shards"] == "half":
        more["shard_degree"] = c["data"] // 2
    if offload := OFFLOADS[c["offload"]]:
        more["offload"] = offload
        more |= {"offload_directory": f'"{disk}"'} if "optimizer" in offload else {}
        more |= {"offload_horizon": 0} if "activations" in offload else {}
    return layout(c["tensor"], c["pipeline"], c["data"], **more)


COMBINATIONS = combinations()


def name_of(c: dict[str, Any]) -> str:
    return " ".join(f"{feature[:3]}={value}" for feature, value in c.items())


@pytest.mark.parametrize("c", cases(COMBINATIONS, COMBINATIONS[:QUICK]), ids=name_of)
def test_a_combination_is_exact(place: Path, engine: Engine, reference: Reference, tmp_path: Path, c: dict[str, Any]) -> None:
    given = overrides(c, tmp_path)
    keys = {"train.dropout": c["dropout"], "train.expert_capacity": c["capacity"]}
    trained = [f"{key}={value}" for key, value in keys.items() if value]
    trained += ['data.documents="separate"'] if c["documents"] == "separate" else []
    expected = engine(c["model"], *trained) if trained else reference(c["model"])
    assert engine(c["model"], *trained, *given).distance(expected) < EXACT


def test_a_job_may_have_each_of_them(place: Path, tmp_path: Path) -> None:
    """At least eighty; every value of every feature stands in one of them."""
    for c in COMBINATIONS:
        spec = job(place, c["model"], overrides(c, tmp_path))
        check_layout(read_shape(spec), spec)
    assert len(COMBINATIONS) >= 80
    for name, values in FEATURES.items():
        assert {c[name] for c in COMBINATIONS} == set(values)
    assert {c["model"] for c in COMBINATIONS} <= set(MODELS)


def test_what_is_left_out_is_refused(place: Path, tmp_path: Path) -> None:
    """``possible`` leaves out no more than the checks of a job do."""
    plain = {name: values[0] for name, values in FEATURES.items()} | {"model": "llama", "schedule": "1f1b", "reduce": "step"}
    for changes, words in (({}, None), ({"offload": "activations"}, "leaves all activations on the device"),
                           ({"data": 4, "microbatches": 4}, "is not a multiple of data")):
        c = plain | changes
        assert possible([c[name] for name in FEATURES]) == (words is None)
        with nullcontext() if words is None else pytest.raises(HpcMpError, match=words):
            spec = job(place, c["model"], overrides(c, tmp_path))
            check_layout(read_shape(spec), spec)
