"""The tokenizer that plain transformers makes of an exported model, beside the one that the run trains with.

``AutoTokenizer`` may take the class of the model's family, which splits text by a rule of its own whatever ``tokenizer.json``
says.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.tokenizer_files import VOCABULARY_FILES, files_there, read_object
from hpc_mp.train.data.bpe import CLASS, write_json
from hpc_mp.train.data.documents import pieces
from hpc_mp.train.data.tokenizer import SIDE_FILES, Tokenizer, load

FILES = 8  # of the job's text, of which the first piece is compared
# What rules of splitting differ in: contractions, digits, blanks and ends of lines, accents put together or not, other scripts.
PROBE = ("It's 2024, and WE'LL pay 1234567.89 of x_1;\n\n    def f(a):\t\treturn a  # 100%\r\n   \n"
         "caf\u00e9 cafe\u0301 na\u00efve \u4f60\u597d\uff0c\u4e16\u754c \u0645\u0631\u062d\u0628\u0627 \U0001f600!!  \n")
# Settings of tokenizer_config.json, the first that agree: as it stands, else the class that takes tokenizer.json as it is.
CANDIDATES: tuple[dict[str, Any], ...] = ({}, {"tokenizer_class": CLASS})
REMEDY = ("use a tokenizer of the model's family that AutoTokenizer has saved, leave data.tokenizer out to train one that fits, "
          "or choose another family: llama takes any tokenizer.json")
Ids = Sequence[Sequence[int]]  # of several texts


def agreeing_settings(directory: Path, config: Mapping[str, Any], files: Sequence[Path], remedy: str = REMEDY) -> dict[str, Any]:
    """Settings of ``tokenizer_config.json`` with which ``AutoTokenizer`` gives the ids of ``directory``'s own tokenizer.

    Args:
        config: of the model.
        files: of the job's text, to compare on.
        remedy: where there are none.

    Raises:
        HpcMpError: there are none for a model of this family, or the tokenizer cannot be loaded.
    """
    from transformers import AutoTokenizer

    own = load(directory)
    texts = (PROBE, *_beginnings(files), *_around_added(own))
    ids = [own.encoder.encode(text, add_special_tokens=False).ids for text in texts]
    differences: list[str] = []
    with TemporaryDirectory() as temporary:
        made = Path(temporary)
        for name in files_there(directory, VOCABULARY_FILES + SIDE_FILES):
            shutil.copyfile(directory / name, made / name)
        if not (made / "tokenizer.json").exists():
            (made / "tokenizer.json").write_text(own.encoder.to_str(), encoding="utf-8")
        write_json(made / "config.json", {"model_type": config["model_type"]})
        given = read_object(made / "tokenizer_config.json")
        for settings in CANDIDATES:
            write_json(made / "tokenizer_config.json", given | settings)
            try:
                theirs = AutoTokenizer.from_pretrained(made, local_files_only=True)
                other = [theirs(text, add_special_tokens=False, truncation=False, verbose=False)["input_ids"] for text in texts]
            except Exception:  # of many kinds, one for each class; the next setting may do
                continue
            if (difference := next(_differences(own, theirs, ids, other), None)) is None:
                return settings
            differences.append(difference)
    raise HpcMpError(
        f"tokenizer {directory}", f"is another one once transformers loads it beside a {config['model_type']} model "
        f"({differences[-1] if differences else 'no class there loads it'})",
        remedy)


def _differences(own: Tokenizer, theirs: Any, ids: Ids, other: Ids) -> Iterator[str]:
    """In the ids of the same text, in the vocabulary with its added tokens, and in the special tokens that the run's names."""
    if ids != other:
        yield f"{sum(map(len, ids))} tokens here, {sum(map(len, other))} there for the same text"
    here, there = own.encoder.get_vocab(), theirs.get_vocab()
    if moved := sorted(token for token in here.keys() | there.keys() if here.get(token) != there.get(token)):
        yield f"the id of {moved[0]!r} is {here.get(moved[0])} here, {there.get(moved[0])} there"
    for name in ("eos", *own.special):
        if (known := own.special.get(name)) != (loaded := getattr(theirs, f"{name}_token_id")):
            yield f"{name}_token_id is {known} here, {loaded} there"


def _around_added(tokenizer: Tokenizer) -> Iterator[str]:
    """Texts with the added tokens, which may take the blanks beside them."""
    return (f"a {token.content} b" for token in tokenizer.encoder.get_added_tokens_decoder().values())


def _beginnings(files: Sequence[Path]) -> Iterator[str]:
    for path in files[:: max(1, len(files) // FILES)]:
        if (piece := next(pieces([path]), None)) is not None:
            yield piece.text
