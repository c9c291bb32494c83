"""The shape of a model from its configuration: by its family's table, else as its code in transformers was read.

To read code takes a process with torch and transformers, some seconds. What it finds out is kept, by configuration and releases,
in ``$XDG_CACHE_HOME/hpc-mp/models`` (``~/.cache`` by default).
"""

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from contextlib import suppress
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import REMEDY
from hpc_mp.layout.models import FAMILIES, Family, family_of
from hpc_mp.layout.models.fields import check_fields
from hpc_mp.layout.models.shape import ModelShape
from hpc_mp.layout.models.sheet import FORMAT, Sheet, shape_of
from hpc_mp.layout.models.types import verdicts

READER = "hpc_mp.train.model.reader"
INCOMPLETE = "give the config.json or the directory of a checkpoint of this type, or its keys in model.config"
REFUSED = 3  # exit code of the reader, behind one line of JSON: value, rule, remedy


def model_shape(config: Mapping[str, Any], checkpoint: str | None) -> ModelShape:
    """Return the shape of a model.

    Args:
        config: of Hugging Face, with its model_type.
        checkpoint: the directory that it comes from; None: a job file.

    Raises:
        HpcMpError: an unknown field or family, impossible sizes, or a model that cannot be divided.
    """
    family = FAMILIES.get(config["model_type"])
    if family is None:
        return shape_of(sheet_of(config))
    check_fields(config, family.fields, family.model_type, checkpoint)
    return family.read(config)


def family_in(config: Mapping[str, Any]) -> Family:
    """Return the family of a configuration that has been accepted."""
    return FAMILIES.get(config["model_type"]) or family_of(shape_of(sheet_of(config)))


def sheet_of(config: Mapping[str, Any]) -> Sheet:
    """Return a model's sheet, as it was kept, or by reading its code. Raises HpcMpError if the model cannot be read."""
    place = place_of(config)
    with suppress(OSError, ValueError):
        return FORMAT.validate_json(place.read_bytes())
    if find_spec("transformers") is None:
        raise HpcMpError(f"model_type = {config['model_type']!r}", f"has no table here (there are {', '.join(FAMILIES)}), and "
                         "transformers, whose code of it could be read, is not installed", REMEDY)
    command = [sys.executable, "-P", "-m", READER]
    done = subprocess.run(command, input=json.dumps(config), capture_output=True, text=True, check=False)
    if done.returncode == REFUSED:
        value, rule, remedy = json.loads(done.stdout)
        kinds = {verdict.model_type for verdict in verdicts() if verdict.verified}
        if [*config] == ["model_type"] and config["model_type"] in kinds:
            rule, remedy = f"has defaults in transformers that are incomplete: such a model {rule}", INCOMPLETE
        raise HpcMpError(value, rule, remedy)
    if done.returncode:
        raise HpcMpError(f"model_type = {config['model_type']!r}", f"cannot be read: {done.stderr.strip().splitlines()[-1]}",
                         "use a model of another type")
    sheet = FORMAT.validate_json(done.stdout)
    keep(config, sheet)
    return sheet


def keep(config: Mapping[str, Any], sheet: Sheet) -> None:
    """Keep a model's sheet for later."""
    place = place_of(config)
    with suppress(OSError):  # a full or read-only home costs the next launch some seconds
        place.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        draft = place.with_suffix(f".{os.getpid()}")
        draft.write_bytes(FORMAT.dump_json(sheet))
        draft.replace(place)


def place_of(config: Mapping[str, Any], environ: Mapping[str, str] = os.environ) -> Path:
    """Return the file of a model's sheet."""
    cache = Path(environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    library = getattr(find_spec("transformers"), "origin", None)
    code = Path(__file__).parents[2] / "train" / "model"  # with the reader's
    changed = [path.stat().st_mtime_ns for path in (*([Path(library)] if library else ()), *sorted(code.glob("*.py")))]
    content = json.dumps([library, changed, config], sort_keys=True, default=repr)
    return cache / "hpc-mp" / "models" / f"{hashlib.sha256(content.encode()).hexdigest()}.json"
