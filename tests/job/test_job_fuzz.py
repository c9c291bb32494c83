"""Any job file: what is right survives being written, what is wrong is refused in our own words."""

import tomllib
from pathlib import Path
from typing import Any

import tomli_w
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from small_job import JOB

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, dump_job, load_job
from hpc_mp.job.layout import check_job, read_shape
from hpc_mp.layout.schedule.names import STAGES_PER_RANK, stages_per_rank
from hpc_mp.layout.stages import layer_costs

MANY = settings(suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow])

# --- what is written can be read -------------------------------------------------------------------------------------

LINES = st.text(st.characters(exclude_categories=["C"]), min_size=1, max_size=20).filter(lambda text: text.isprintable())
PATHS = LINES.filter(lambda text: text[0] != "~" and text.strip() == text)
NAMES = st.from_regex(r"[A-Za-z0-9][A-Za-z0-9._-]{0,20}", fullmatch=True)
TEXTS = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0"), max_size=20)
WHOLE = st.integers(-2**63, 2**63 - 1)
VALUES = st.recursive(
    WHOLE | st.booleans() | TEXTS | st.floats(allow_nan=False, allow_infinity=False),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(TEXTS, inner, max_size=3), max_leaves=8)
RATES = st.floats(0, 1e300) | st.integers(0, 10)
SHARES = st.floats(0, 1, exclude_max=True)


@st.composite
def jobs(draw: st.DrawFn) -> dict[str, Any]:
    """A tree that is a right job file: some keys given, some left out."""
    tensor, pipeline, data, microbatches = (draw(st.integers(1, 4)) for _ in range(4))
    steps, zero = draw(st.integers(1, 2**40)), draw(st.integers(0, 3))
    schedule = draw(st.sampled_from([*STAGES_PER_RANK, "tables/mine.csv"]))
    virtual_stages = draw(st.integers(1, 3)) if STAGES_PER_RANK.get(schedule) is None else 1
    microbatches *= pipeline if schedule == "interleaved_1f1b" else 1
    stages = pipeline * stages_per_rank(schedule, virtual_stages)
    sgd = draw(st.booleans())
    optional: dict[str, dict[str, st.SearchStrategy[Any]]] = {
        "job": {"name": NAMES, "directory": PATHS, "device": st.sampled_from(["auto", "cpu", "cuda"]),
                "time_limit": st.sampled_from(["5", "02:00:00", "1-12", "1-00:00:00", "90:00"])},
        "model": {}, "data": {"tokenizer": PATHS},
        "parallel": {"microbatches": st.just(microbatches),
                     "partition": st.sampled_from(["auto", "uniform", "parameters", "cost", "at:model.layers.[3-5]"])
                     | st.lists(st.integers(1, 99), min_size=stages, max_size=stages)
                     | st.integers(1, 99).map(lambda most: [0, *[most] * (stages - 2), 0] if stages > 2 else [most] * stages),
                     "order": st.sampled_from(["auto", "cluster", "spread", "PDT", "TPDC"]),
                     **({"shard_degree": st.sampled_from([d for d in range(1, data + 1) if data % d == 0])} if zero else {})},
        "train": {"learning_rate": RATES, "eps": st.floats(1e-300, 1), "betas": st.tuples(SHARES, SHARES).map(list),
                  "warmup_steps": st.integers(0, steps), "lr_schedule": st.sampled_from(["constant", "linear", "cosine"]),
                  "weight_decay": RATES, "clip": RATES, "precision": st.sampled_from(["fp64", "fp32", "bf16"]),
                  "dropout": SHARES, "seed": st.integers(0, 2**63 - 1), **({"momentum": SHARES} if sgd else {})},
        "checkpoint": {"every": st.integers(0, 100), "keep": st.integers(1, 9), "resume": PATHS},
        "slurm": {**dict.fromkeys(("partition", "account", "qos", "constraint", "reservation"), LINES), "gpu_type": NAMES,
                  "gpu_request": st.sampled_from(["auto", "gpus-per-node", "gres", "none"]),
                  "setup": st.lists(TEXTS, max_size=3),
                  "extra": st.dictionaries(st.from_regex(r"[a-z][a-z0-9-]{0,9}", fullmatch=True),
                                           TEXTS | WHOLE | st.booleans(), max_size=3)},
        "environment": {"set": st.dictionaries(st.from_regex(r"[A-Z_][A-Z0-9_]{0,9}", fullmatch=True), TEXTS, max_size=3)},
    }
    tree = {section: draw(st.fixed_dictionaries({}, optional=keys)) for section, keys in optional.items()}
    tree["job"] |= {"nodes": data, "ranks_per_node": tensor * pipeline}
    tree["model"] = draw(st.fixed_dictionaries({"pretrained": PATHS}) | st.fixed_dictionaries({
        "config": st.dictionaries(TEXTS, VALUES, max_size=4).map(lambda config: config | {"model_type": "gpt2"})}))
    tree["data"] |= {"files": draw(st.lists(PATHS, min_size=1, max_size=3)), "sequence_length": draw(st.integers(1, 2**40))}
    tree["parallel"] |= {"tensor": tensor, "pipeline": pipeline, "zero": zero, "schedule": schedule,
                         "virtual_stages": virtual_stages}
    tree["train"] |= {"steps": steps, "global_batch": data * microbatches * draw(st.integers(1, 2**40)),
                      "optimizer": "sgd" if sgd else "adamw"}
    return tree


def settled(spec: JobSpec) -> JobSpec:
    """With the number of microbatches written down, as ``dump_job`` does."""
    return spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"microbatches": spec.microbatches})})


@MANY
@given(tree=jobs())
def test_what_is_written_reads_as_the_same_job(tmp_path: Path, tree: dict[str, Any]) -> None:
    (tmp_path / "job.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    spec = load_job(tmp_path / "job.toml")
    (tmp_path / "elsewhere").mkdir(exist_ok=True)
    (tmp_path / "elsewhere" / "job.toml").write_text(dump_job(spec), encoding="utf-8")
    again = load_job(tmp_path / "elsewhere" / "job.toml")
    assert again == settled(spec)
    assert dump_job(again) == dump_job(spec)


# --- whatever is written, the answer is a job or a message -----------------------------------------------------------

ANY = st.recursive(
    st.none().map(lambda _: {}) | st.integers() | WHOLE | st.integers(-5, 300) | st.booleans() | st.floats()
    | st.text(st.characters(exclude_categories=["Cs"])) | st.dates() | st.times() | st.datetimes()
    | st.sampled_from(["auto", "gpt2", "llama", "~", "~x/y", "/", "..", "1" * 300, 10**400, 2**40, {}, []]),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(
        st.sampled_from(["model_type", "n_layer", "n_embd", "hidden_size", "vocab_size"]) | TEXTS, inner, max_size=4))
KEYS = [(section, key) for section, field in JobSpec.model_fields.items() for key in field.annotation.model_fields]
MODEL = ("num_hidden_layers", "hidden_size", "num_attention_heads", "num_key_value_heads", "head_dim", "intermediate_size",
         "vocab_size", "max_position_embeddings", "tie_word_embeddings", "attention_bias", "initializer_range", "model_type")
CHANGES = st.tuples(st.sampled_from([*KEYS, *(("model", "config", key) for key in MODEL), *((s,) for s in JobSpec.model_fields)])
                    | st.lists(TEXTS, min_size=1, max_size=3).map(tuple), ANY)


def answers(path: Path, overrides: list[str] | None = None) -> bool:
    """Read a job file and do everything with it that needs no other file; False when it is refused in our own words."""
    try:
        spec = load_job(path, overrides or [])
        dump_job(spec)
        shape = read_shape(spec)
        check_job(spec, shape)
        layer_costs(shape, spec.data.sequence_length)
    except HpcMpError as error:
        assert len(str(error)) < 3000
        return False
    return True


def test_the_fuzz_tells_right_from_wrong(tmp_path: Path) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    assert answers(tmp_path / "job.toml")
    assert not answers(tmp_path / "job.toml", ["parallel.tensor=8"])


@MANY
@given(changes=st.lists(CHANGES, min_size=1, max_size=3))
def test_any_tree_is_a_job_or_refused(tmp_path: Path, changes: list[tuple[tuple[str, ...], Any]]) -> None:
    tree = tomllib.loads(JOB)
    for where, value in changes:
        table = tree
        for part in where[:-1]:
            if not isinstance(table.get(part), dict):
                table[part] = {}
            table = table[part]
        table[where[-1]] = value
    (tmp_path / "job.toml").write_text(tomli_w.dumps(tree), encoding="utf-8")
    answers(tmp_path / "job.toml")


@MANY
@given(position=st.integers(0, len(JOB)), length=st.integers(0, 20), put=st.binary(max_size=20) | st.text(max_size=20).map(
    lambda text: text.encode("utf-8", "replace")))
def test_any_text_is_a_job_or_refused(tmp_path: Path, position: int, length: int, put: bytes) -> None:
    raw = JOB.encode()
    (tmp_path / "job.toml").write_bytes(raw[:position] + put + raw[position + length:])
    answers(tmp_path / "job.toml")


@MANY
@given(key=st.sampled_from([".".join(key) for key in KEYS]) | TEXTS, value=TEXTS | ANY.map(
    lambda value: tomli_w.dumps({"v": value}).removeprefix("v = ").strip()), equals=st.sampled_from(["=", "=", "=", ""]))
def test_any_override_is_taken_or_refused(tmp_path: Path, key: str, value: str, equals: str) -> None:
    (tmp_path / "job.toml").write_text(JOB)
    answers(tmp_path / "job.toml", [f"{key}{equals}{value}"])
