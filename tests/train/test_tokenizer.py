"""Which tokenizer a job gets: given, of the pretrained model, or trained."""

import json
import os
import shutil
import subprocess
import sys
import sysconfig
import threading
import time
from itertools import product
from pathlib import Path
from unicodedata import normalize

import numpy as np
import pytest
import tokenizers
from tables import table
from token_files import ODD, TEXT, gpt2_files, prepared, words, write, write_rows

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.tokenizer_files import find_tokenizer
from hpc_mp.train.data import bpe, load_tokens
from hpc_mp.train.data.tokenizer import Tokenizer, load
from hpc_mp.train.data.tokenizer_agreement import agreeing_settings


def test_given_before_pretrained_before_trained(tmp_path: Path) -> None:
    given, pretrained = words(tmp_path / "given", ["?", "a"]), words(tmp_path / "pretrained", ["?", "b", "a"])
    text = write(tmp_path / "a.txt", "a")
    assert find_tokenizer(given, pretrained) == given
    assert find_tokenizer(None, pretrained) == pretrained
    assert find_tokenizer(None, None) is None
    assert prepared(tmp_path / "cache", text, given=given, pretrained=pretrained).tokens().tolist() == [1]
    assert prepared(tmp_path / "cache", text, pretrained=pretrained).tokens().tolist() == [2]
    trained = prepared(tmp_path / "cache", text)
    assert load(trained.tokenizer_directory).encoder.decode(trained.tokens().tolist(), False) == "a" + bpe.END


def ids_of(tokenizer: Tokenizer, text: str) -> list[int]:
    return list(tokenizer.encoder.encode(text, add_special_tokens=False).ids)


def test_a_trained_tokenizer(tmp_path: Path) -> None:
    token_set = prepared(tmp_path / "cache", write(tmp_path / "a.txt", TEXT), vocabulary=290)
    tokenizer = load(token_set.tokenizer_directory)
    assert tokenizer.size == 290 and tokenizer.encoder.id_to_token(tokenizer.end or 0) == bpe.END
    assert token_set.count < len(TEXT) / 2  # it learnt something
    ids = tokenizer.encoder.encode(ODD).ids
    assert tokenizer.encoder.decode(ids, skip_special_tokens=False) == ODD  # no byte is unknown
    rare = prepared(tmp_path / "rare", write(tmp_path / "b.txt", "abcdefgh"), vocabulary=290)
    assert load(rare.tokenizer_directory).size == 257  # no pair occurs twice


TRAIN = """
import sys
from pathlib import Path
from hpc_mp.train.data import bpe
names = sys.argv[2:]
print(bpe.train([Path(name) for name in names], names, vocabulary=2000, cache=Path(sys.argv[1])))
"""


def test_training_does_not_depend_on_threads(tmp_path: Path) -> None:
    """Else two sites would train on other tokens from the same job file."""
    stdlib = Path(sysconfig.get_path("stdlib"))
    names = [str(stdlib / f"{name}.py") for name in ("ast", "argparse", "typing", "inspect")]
    trained = set()
    for threads in ("1", "4"):
        directory = subprocess.run([sys.executable, "-c", TRAIN, tmp_path / threads, *names], check=True, text=True,
                                   stdout=subprocess.PIPE, env=os.environ | {"RAYON_NUM_THREADS": threads}).stdout
        trained.add(Path(directory.strip(), "tokenizer.json").read_text())
    assert len(trained) == 1


def test_the_training_sample_is_spread_evenly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"text": f"row {i:03d} "} for i in range(500)]
    file = write_rows(tmp_path / "a.jsonl", *rows)
    assert list(bpe._sample([file])) == [row["text"] for row in rows]  # small enough: all of it
    monkeypatch.setattr(bpe, "TEXT", file.stat().st_size // 10)
    sample = list(bpe._sample([file]))
    assert 45 <= len(sample) <= 50
    numbers = [int(text.split()[1]) for text in sample]
    assert max(np.diff(numbers)) <= 11 and numbers[0] <= 10 and numbers[-1] >= 489


@pytest.mark.parametrize(("kind", "family"), [
    *product(("trained", "gpt2", "bare"), (None, "gpt2", "gptj", "llama", "mixtral")), ("trained", "qwen2")])
def test_transformers_loads_it_and_gives_the_same_ids(tmp_path: Path, kind: str, family: str | None) -> None:
    """Alone, and in an exported model, where the class of the model's family must not take over."""
    from transformers import AutoTokenizer

    gpt2 = gpt2_files(tmp_path / "gpt2")
    (trained,) = (gpt2 / "cache").glob("*/tokenizer.json")
    bare = write(tmp_path / "bare" / "tokenizer.json", trained.read_text()).parent  # and nothing else
    text = write(tmp_path / "a.txt", TEXT + ODD)
    token_set = prepared(tmp_path / "cache", text, given={"trained": None, "gpt2": gpt2, "bare": bare}[kind],
                         model_type=family or "gpt2")
    exported = tmp_path / "exported"
    shutil.copytree(token_set.tokenizer_directory, exported)
    if family:
        write(exported / "config.json", json.dumps({"model_type": family}))
    assert json.loads((exported / "tokenizer_config.json").read_text())["tokenizer_class"] == bpe.CLASS
    theirs = AutoTokenizer.from_pretrained(exported)
    end = None if kind == "bare" else bpe.END
    assert theirs.eos_token == end
    expected = theirs(text.read_bytes().decode())["input_ids"] + ([] if end is None else [theirs.eos_token_id])
    assert token_set.tokens().tolist() == expected
    whole = TEXT + ODD if family != "qwen2" else normalize("NFC", TEXT + ODD)
    assert theirs.decode(expected, clean_up_tokenization_spaces=False) == whole + (end or "")
    assert agreeing_settings(token_set.tokenizer_directory, {"model_type": family or "gpt2"}, [text]) == {}


def test_the_rule_of_a_family_is_that_of_transformers() -> None:
    from transformers.models.qwen2.tokenization_qwen2 import PRETOKENIZE_REGEX

    assert {"qwen2": PRETOKENIZE_REGEX} == bpe.SPLITS


def one_split_by(directory: Path, pattern: str, **config: str) -> Path:
    """Somebody's own byte-level BPE with a rule of splitting that is no family's."""
    (trained,) = (gpt2_files(directory / "of") / "cache").glob("*/tokenizer.json")
    encoder = tokenizers.Tokenizer.from_file(str(trained))
    encoder.pre_tokenizer = tokenizers.pre_tokenizers.Sequence([
        tokenizers.pre_tokenizers.Split(tokenizers.Regex(pattern), "isolated"),
        tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    write(directory / "tokenizer_config.json", json.dumps(config))
    return write(directory / "tokenizer.json", encoder.to_str()).parent


@pytest.mark.parametrize("given", [{}, {"tokenizer_class": "GPT2Tokenizer"}, {"tokenizer_class": "PreTrainedTokenizerFast"},
                                   {"tokenizer_class": "Qwen2Tokenizer"}], ids=str)
@pytest.mark.parametrize("family", ["gpt2", "gptj", "llama", "mixtral", "qwen2"])
def test_an_own_rule_is_kept_or_refused(tmp_path: Path, family: str, given: dict[str, str]) -> None:
    """For a Qwen2 model transformers has one rule; elsewhere a class is found with which it keeps to tokenizer.json."""
    from transformers import AutoTokenizer

    directory, text = one_split_by(tmp_path / "own", r"\p{N}{1,3}|[a-z]|\s", **given), write(tmp_path / "a.txt", TEXT * 3)
    if family == "qwen2":
        with pytest.raises(HpcMpError, match=r"another one once transformers loads it beside a qwen2 .*\(\d+ tokens here, \d+"):
            agreeing_settings(directory, {"model_type": family}, [text])
        return
    settings = agreeing_settings(directory, {"model_type": family}, [text])
    write(directory / "tokenizer_config.json", json.dumps(given | settings))
    write(directory / "config.json", json.dumps({"model_type": family}))
    theirs = AutoTokenizer.from_pretrained(directory)
    assert theirs(TEXT, add_special_tokens=False)["input_ids"] == ids_of(load(directory), TEXT)
    fits = family == "mixtral" or given.get("tokenizer_class") == bpe.CLASS or (family == "llama" and not given)
    assert settings == ({} if fits else {"tokenizer_class": bpe.CLASS})


@pytest.mark.parametrize(
    ("family", "config", "difference"), table(__file__, "tokenizer.toml", "special_tokens", vars(bpe)), ids=str)
def test_special_and_added_tokens_are_compared(tmp_path: Path, family: str, config: dict[str, object],
                                               difference: str | dict[str, str]) -> None:
    text = write(tmp_path / "a.txt", TEXT)
    source = bpe.train([text], ["a"], vocabulary=300, cache=tmp_path / "cache", model_type=family)
    (source / "special_tokens_map.json").unlink()
    write(source / "tokenizer_config.json", json.dumps(config))
    if isinstance(difference, dict):
        assert agreeing_settings(source, {"model_type": family}, [text]) == difference
        return
    with pytest.raises(HpcMpError) as refused:
        agreeing_settings(source, {"model_type": family}, [text])
    assert f"beside a {family} model ({difference})" in refused.value.rule


def test_qwen2s_own_tokenizer_stays_as_it_is(tmp_path: Path) -> None:
    from transformers import Qwen2Tokenizer

    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {piece: number for number, piece in enumerate([*alphabet, "th", "the", "12"])}
    Qwen2Tokenizer(vocab=vocab, merges=[("t", "h"), ("th", "e"), ("1", "2")]).save_pretrained(tmp_path / "own")
    assert agreeing_settings(tmp_path / "own", {"model_type": "qwen2"}, []) == {}


def test_gpt2_files(tmp_path: Path) -> None:
    directory = gpt2_files(tmp_path / "gpt2")
    trained = load(next((directory / "cache").iterdir()))
    ours = load(directory)
    assert ids_of(ours, TEXT + ODD) == ids_of(trained, TEXT + ODD) and ours.end == trained.end
    spaced = load(gpt2_files(tmp_path / "spaced", tokenizer_config='{"add_prefix_space": true}'))
    assert ids_of(spaced, "fox") == ids_of(ours, " fox") != ids_of(ours, "fox")


def test_a_run_does_not_depend_on_the_given_directory(tmp_path: Path) -> None:
    given = words(tmp_path / "given", ["?", "a"], eos_token="a")
    token_set = prepared(tmp_path / "cache", write(tmp_path / "a.txt", "a"), given=given)
    shutil.rmtree(given)
    assert load(token_set.tokenizer_directory).end == 1
    assert load_tokens(token_set.directory).tokenizer_directory.parent == tmp_path / "cache"


@pytest.mark.parametrize(("files", "rule"), [
    *table(__file__, "tokenizer.toml", "refused"), ({"tokenizer.json": b"\xff"}, "cannot be loaded")])
def test_tokenizers_that_are_refused(tmp_path: Path, files: dict[str, str | bytes], rule: str) -> None:
    directory = tmp_path / "tokenizer"
    for name, content in files.items():
        write(directory / name, content)
    with pytest.raises(HpcMpError) as caught:
        prepared(tmp_path / "cache", write(tmp_path / "a.txt", TEXT), given=directory)
    assert str(directory) in caught.value.value and rule in caught.value.rule and caught.value.remedy
    assert not (tmp_path / "cache").exists()


def test_a_checkpoint_with_a_tokenizer_that_is_not_built_does_not_get_another_one(tmp_path: Path) -> None:
    write(tmp_path / "pretrained" / "tokenizer.model", "x")
    with pytest.raises(HpcMpError, match="not supported yet"):
        prepared(tmp_path / "cache", write(tmp_path / "a.txt", TEXT), pretrained=tmp_path / "pretrained")


def test_ids_beyond_the_vocabulary(tmp_path: Path) -> None:
    given = words(tmp_path / "given", ["?", "a", "b"])
    text = write(tmp_path / "a.txt", "a")
    assert prepared(tmp_path / "cache", text, given=given, vocabulary=3).count == 1
    with pytest.raises(HpcMpError, match="largest id 2 needs a vocabulary of 3, but the model's is 2"):
        prepared(tmp_path / "cache", text, given=given, vocabulary=2)
    assert prepared(tmp_path / "cache", text, vocabulary=257).count == 2
    with pytest.raises(HpcMpError, match=r"256 bytes \+ <\|endoftext\|> = 257"):
        prepared(tmp_path / "cache", text, vocabulary=256)


def test_training_hears_of_a_stop(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The library is in its own code for many seconds, and returns to Python for no signal."""
    ended = threading.Event()
    monkeypatch.setattr(bpe, "_sample", lambda files, reading: iter(lambda: "end" if ended.wait(30) else "no", "end"))
    file = write(tmp_path / "a.txt", TEXT)

    def poll() -> None:
        raise KeyboardInterrupt

    began = time.monotonic()
    with pytest.raises(KeyboardInterrupt):
        bpe.train([file], ["a"], vocabulary=300, cache=tmp_path / "cache", poll=poll)
    ended.set()
    assert time.monotonic() - began < 25
    assert list((tmp_path / "cache").iterdir()) == [], "nothing half-made is left"


def test_an_error_in_training_is_raised(tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match="NUL bytes"):
        bpe.train([write(tmp_path / "a.txt", b"a\0")], ["a"], vocabulary=300, cache=tmp_path / "cache")
