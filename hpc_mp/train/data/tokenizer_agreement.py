"""Agreement of the tokenizer that plain transformers loads from an exported model with the tokenizer of the run.

``AutoTokenizer`` may use the class of the model's family, which has its own splitting rule whatever ``tokenizer.json`` states.
"""

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.rows import Labelled, RowForm
from hpc_mp.job.tokenizer_files import VOCABULARY_FILES, files_there, read_object
from hpc_mp.train.data.bpe import CLASS, write_json
from hpc_mp.train.data.documents import DocumentReading, pieces
from hpc_mp.train.data.tokenizer import SIDE_FILES, Tokenizer, load

FILES = 8  # limit of files of the job's text; the first piece of each is compared
# Text on which splitting rules differ: contractions, digits, blanks, line ends, composed and decomposed accents, other scripts.
PROBE = ("It's 2024, and WE'LL pay 1234567.89 of x_1;\n\n    def f(a):\t\treturn a  # 100%\r\n   \n"
         "caf\u00e9 cafe\u0301 na\u00efve \u4f60\u597d\uff0c\u4e16\u754c \u0645\u0631\u062d\u0628\u0627 \U0001f600!!  \n")
# Settings of tokenizer_config.json, tried in order: unchanged, then the class that takes tokenizer.json as it is.
CANDIDATES: tuple[dict[str, Any], ...] = ({}, {"tokenizer_class": CLASS})
REMEDY = ("use a tokenizer of the model's family that AutoTokenizer has saved, leave data.tokenizer out to train one that fits, "
          "or choose another family: llama takes any tokenizer.json")
Ids = Sequence[Sequence[int]]  # one per text


def agreeing_settings(directory: Path, config: Mapping[str, Any], files: Sequence[Path], remedy: str = REMEDY,
                      form: RowForm = "auto") -> dict[str, Any]:
    """Return settings of ``tokenizer_config.json`` that make ``AutoTokenizer`` agree with the tokenizer in ``directory``; in the
    special tokens of a template too, if these are trained on.

    Args:
        config: the model's config.
        files: files of the job's text, to compare on.
        remedy: advice in the error if no settings agree.
        form: ``data.form``.

    Raises:
        HpcMpError: no settings agree for a model of this family, or the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    tokenizer = load(directory)
    added = tokenizer.encoder.get_added_tokens_decoder().values()  # they may absorb the blanks beside them
    texts = (PROBE, *_beginnings(files, form), *(f"a {token.content} b" for token in added))
    special = isinstance(form, Labelled)
    ids = [tokenizer.encoder.encode(text, add_special_tokens=special).ids for text in texts]
    differences: list[str] = []
    with TemporaryDirectory() as temporary:
        copy = Path(temporary)
        for name in files_there(directory, VOCABULARY_FILES + SIDE_FILES):
            shutil.copyfile(directory / name, copy / name)
        if not (copy / "tokenizer.json").exists():
            (copy / "tokenizer.json").write_text(tokenizer.encoder.to_str(), encoding="utf-8")
        write_json(copy / "config.json", {"model_type": config["model_type"]})
        defaults = read_object(copy / "tokenizer_config.json")
        for settings in CANDIDATES:
            write_json(copy / "tokenizer_config.json", defaults | settings)
            try:
                theirs = AutoTokenizer.from_pretrained(copy, local_files_only=True)
                other = [theirs(text, add_special_tokens=special, truncation=False, verbose=False)["input_ids"] for text in texts]
            except Exception:  # of many classes, one for each tokenizer class; the next setting may work
                continue
            if (difference := next(_differences(tokenizer, theirs, ids, other), None)) is None:
                return settings
            differences.append(difference)
    raise HpcMpError(
        f"tokenizer {directory}", f"is another one once transformers loads it beside a {config['model_type']} model "
        f"({differences[-1] if differences else 'no class there loads it'})", remedy)


def _differences(tokenizer: Tokenizer, theirs: Any, ids: Ids, other_ids: Ids) -> Iterator[str]:
    """Yield differences in the ids of the same text, in the vocabulary with added tokens, and in the run's special tokens."""
    if ids != other_ids:
        yield f"{sum(map(len, ids))} tokens here, {sum(map(len, other_ids))} there for the same text"
    vocab, other_vocab = tokenizer.encoder.get_vocab(), theirs.get_vocab()
    if moved := sorted(token for token in vocab.keys() | other_vocab.keys() if vocab.get(token) != other_vocab.get(token)):
        yield f"the id of {moved[0]!r} is {vocab.get(moved[0])} here, {other_vocab.get(moved[0])} there"
    for name in ("eos", *tokenizer.special):
        if (token_id := tokenizer.special.get(name)) != (other_id := getattr(theirs, f"{name}_token_id")):
            yield f"{name}_token_id is {token_id} here, {other_id} there"


def _beginnings(files: Sequence[Path], form: RowForm) -> Iterator[str]:
    for path in files[:: max(1, len(files) // FILES)]:
        if (piece := next(pieces([path], reading=DocumentReading(form)), None)) is not None:
            yield piece.text
