"""Models of masked tokens equal one process of plain transformers on every axis, in fp64 to 1e-12."""

from collections import Counter
from collections.abc import Mapping
from dataclasses import replace
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from beside import on_rank
from covering import cover
from exact import EXACT, WRONG, cases
from lists import lay
from masked import LENGTH, STEPS, Training, distance, values
from planting import planted, wrapped
from ranks import run_ranks

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import check_job, read_shape
from hpc_mp.layout.checks import check_layout
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import Family, ModelShape
from hpc_mp.layout.stages import Partition, layer_costs
from hpc_mp.planner.memory import units_of
from hpc_mp.planner.traffic import rank_traffic
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.parallel.data_axis import Unit

ONE = {"layers": (5,)}
ALONE = frozenset(("token_types", "documents"))
LAYOUTS: Mapping[str, Layout] = {
    "one": lay(**ONE),
    "tp2": lay(2, **ONE),
    "tp8": lay(8, **ONE),
    "pp2": lay(pipeline=2, layers=(2, 3), microbatches=4),
    "pp2 layers 1+4": lay(pipeline=2, layers=(1, 4)),
    "pp3 layers 0+5+0": lay(pipeline=3, layers=(0, 5, 0), microbatches=4),
    "pp2 zero_bubble_v": lay(pipeline=2, layers=(1, 2, 1, 1), schedule="zero_bubble_v", microbatches=4),
    "zero1": lay(data=2, zero=1, **ONE),
    "zero3": lay(data=2, zero=3, **ONE),
    "zero3 pp2": lay(pipeline=2, data=2, zero=3, layers=(1, 4)),
    "sequence": lay(2, sequence_parallel=True, **ONE),
    "sequence tp4 zero3": lay(4, data=2, sequence_parallel=True, zero=3, **ONE),
    "tp2 pp2 dp2": lay(2, 2, 2, layers=(2, 3), zero=2, reduce="microbatch"),
    "recompute full": lay(2, 2, layers=(2, 3), recompute="full"),
    "recompute every-2": lay(pipeline=2, layers=(2, 3), recompute="every-2"),
    "selective": lay(2, recompute="selective", **ONE),
    "attention whole": lay(2, sequence_parallel=True, tensor_modules=("*[ep]", "*s"), **ONE),  # intermediate or mlp, embeddings
    "embedding whole": lay(2, sequence_parallel=True, tensor_modules=("*.att*",), **ONE),
    "ulysses": replace(lay(**ONE), degrees=replace(lay().degrees, context=2), context_method="ulysses"),
}
TRAININGS = {
    "types and padding": Training(),
    "ids alone": Training(without=ALONE),
    "dropout": Training({"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}),
    "documents": Training(packed=True),
    "roberta": Training(kind="roberta"),
    "roberta with documents": Training(kind="roberta", packed=True),
    "roberta with dropout": Training({"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}, kind="roberta"),
    "modernbert": Training(kind="modernbert"),
    "modernbert with documents": Training({"attention_bias": True}, kind="modernbert", packed=True),
    "modernbert with dropout": Training({"embedding_dropout": 0.2, "attention_dropout": 0.3}, kind="modernbert"),
    "modernbert without windows": Training({"local_attention": 2 * LENGTH}, without=ALONE, kind="modernbert"),
}
QUICK = {("types and padding", name) for name in ("zero3", "sequence")} | {
    ("ids alone", "pp2 layers 1+4"), ("dropout", "recompute full"), ("roberta with documents", "sequence"),
    ("roberta", "tp2 pp2 dp2"), ("modernbert", "tp2 pp2 dp2"), ("modernbert with documents", "zero3")}
CASES = [(training, name) for training in TRAININGS for name in LAYOUTS
         if name != "ulysses" or TRAININGS[training].model().shape.narrowest(LENGTH) is None]  # ranks of context have no windows


def shown(training: str, name: str) -> frozenset[Any]:
    """Return the facts that a case shows: that a layout works with a family and with what else is particular to a training; and
    that each axis that is cut works with this training."""
    given, layout = TRAININGS[training], LAYOUTS[name]
    features = {"documents": given.packed, "less": given.without, "dropout": [key for key in given.config if "dropout" in key]}
    cuts = {axis: getattr(layout.degrees, axis) > 1 for axis in ("tensor", "pipeline", "data", "context")} | {
        "zero 3": layout.zero == 3, "sequence": layout.sequence_parallel, "recompute": layout.recompute != "none",
        "modules": layout.tensor_modules != lay().tensor_modules}
    return frozenset([*product([given.kind, *(word for word, is_so in features.items() if is_so)], [name]),
                      *((training, cut) for cut, is_so in cuts.items() if is_so)])


COVER = cover({case: shown(*case) for case in CASES}, lambda case: 1 + LAYOUTS[case[1]].ranks)


def test_every_layout_meets_every_family() -> None:
    """The proofs show what all trainings on all layouts would. The negative control: each shows something that no other does."""
    every, few = (Counter(fact for case in given for fact in shown(*case)) for given in (CASES, COVER))
    assert few.keys() == every.keys() and len(COVER) < 0.5 * len(CASES)
    assert all(1 in [few[fact] for fact in shown(*case)] for case in COVER)


@pytest.mark.parametrize(("training", "name"), cases(sorted({*COVER, *QUICK}), QUICK))
def test_a_model_of_masked_tokens_equals_one_process(training: str, name: str) -> None:
    assert distance(LAYOUTS[name], TRAININGS[training]) < EXACT


def without_bias(family: Family) -> Family:
    """The head does not know its bias, which then is a weight beside it."""
    return replace(family, head_weights=lambda shape: family.head_weights(shape)[:1],
                   norm_weights=lambda shape: (*family.norm_weights(shape), *family.head_weights(shape)[1:]))


def causal(family: Family) -> Family:
    return replace(family, read=lambda config: replace(family.read(config), bidirectional=False))


def windows(family: Family, more: int) -> Family:
    """Windows have so many tokens more on either side."""
    def read(config: Mapping[str, Any]) -> ModelShape:
        shape = family.read(config)
        return replace(shape, windows=tuple(window and window + more for window in shape.windows))

    return replace(family, read=read)


padding_counted = wrapped(TransformersStage, "_counted", lambda counted: lambda stage, ids, begins: counted(
    stage, torch.zeros_like(ids), begins))
documents_joined = wrapped(TransformersStage, "_counted", lambda counted: lambda stage, ids, begins: counted(stage, ids, None))
ROBERTA, MODERNBERT = TRAININGS["roberta"], TRAININGS["modernbert"]
CONTROLS = {  # what is wrong, the right training, and a fault of the ranks
    "attention is causal": (Training({"is_decoder": True}, without=ALONE), TRAININGS["ids alone"]),
    "attention is causal in documents": (Training(family=causal), Training()),
    "the head has no bias": (Training(family=without_bias), Training()),
    "all tokens are of one kind": (Training(without=frozenset(("token_types",))), Training()),
    "padding is seen": (Training(without=frozenset(("documents",))), Training()),
    "padding learns": (Training({"pad_token_id": None}), Training()),
    "padding has positions": (ROBERTA, ROBERTA, padding_counted),
    "positions go on in the next document": (*[TRAININGS["roberta with documents"]] * 2, documents_joined),
    "the head of RoBERTa has no bias": (replace(ROBERTA, family=without_bias), ROBERTA),
    "windows are wider": (replace(MODERNBERT, family=partial(windows, more=1)), MODERNBERT),
    "windows hide nothing": (replace(MODERNBERT, family=partial(windows, more=LENGTH)), MODERNBERT),
    "windows end with the token": (replace(MODERNBERT, family=causal), MODERNBERT),
    "all layers rotate alike": (replace(MODERNBERT, config={"local_rope_theta": 160_000.0}), MODERNBERT),
}


@pytest.mark.parametrize("control", cases(CONTROLS, ("the head has no bias", "padding has positions", "windows are wider")))
def test_what_a_model_of_masked_tokens_needs_is_missed(control: str) -> None:
    assert distance(LAYOUTS["one"], *CONTROLS[control]) > WRONG


def test_the_planner_counts_what_is_gathered_anew_for_the_norm_behind_the_embedding() -> None:
    """With ZeRO-3 the backward of that norm needs its weight, which lies in the unit of the positions."""
    layout, training = replace(LAYOUTS["zero3 pp2"], sequence=LENGTH), Training()

    def rank() -> float:
        sent: list[int] = []

        @planted(Unit, "_gather")
        def counted(gather: Any, unit: Unit) -> Any:
            sent.append(unit.whole.element_size() * unit.layout.part * (unit.shard.size - 1))
            return gather(unit)

        counted()
        on_rank(layout, training.model(), values(training.model()), training.batches())
        return sum(sent) / STEPS

    shape = training.model().shape
    scattered = [sum(unit.part * 8 for unit in units_of(layout, shape, stage, 0).values()) for stage in (0, 1)]
    assert sorted(run_ranks(layout.ranks, rank)) == sorted(
        [rank_traffic(layout, shape, stage).dp - scattered[stage] for stage in (0, 1)] * 2)


def spec_of(**more: object) -> JobSpec:
    return JobSpec.model_validate({"model": {"config": {"model_type": "bert", **more}}, "train": {"steps": 1, "global_batch": 1},
                                   "data": {"files": ["a.txt"], "sequence_length": 8}})


def test_a_job_file_does_not_train_masked_tokens() -> None:
    with pytest.raises(HpcMpError, match=r"masked tokens, but a job file prepares text for the next token\. Train it in a"):
        check_job(spec_of(), read_shape(spec_of()))
    with pytest.raises(HpcMpError, match="tie_word_embeddings = false: is not supported yet"):
        read_shape(spec_of(tie_word_embeddings=False))


def test_a_ring_is_causal() -> None:
    shape = read_shape(spec_of())
    ring = replace(LAYOUTS["ulysses"], context_method="ring")
    with pytest.raises(HpcMpError, match="is causal attention, but tokens of a bert model attend to later ones too"):
        check_layout(ring, shape, Partition("auto"))
    check_layout(LAYOUTS["ulysses"], shape, Partition("auto"))


def test_attention_in_both_directions_costs_twice_as_much() -> None:
    shape = read_shape(spec_of())
    one_way, both = (layer_costs(replace(shape, bidirectional=both), 64).blocks[0] for both in (False, True))
    assert both - one_way == 2 * 2 * shape.hidden * 32
