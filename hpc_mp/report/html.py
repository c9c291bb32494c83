"""Self-contained HTML files: one frame around every page, and the publication of a page."""

import base64
import hashlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpc_mp import __version__
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import owners, write_text
from hpc_mp.base.text import data_rate, moment, percent

HERE = Path(__file__).resolve().parent


def filled(template: Path, now: float, **values: Any) -> str:
    """Return a page as of ``now`` (unix seconds): ``frame.html.j2`` around ``template``. All values are escaped. The style and
    the only script are ours; the page allows only the script with its hash."""
    script = (HERE / "page.js").read_text(encoding="utf-8")
    environment = Environment(loader=FileSystemLoader([template.parent, HERE]), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    environment.filters |= {"percent": percent, "rate": data_rate}
    return environment.get_template(template.name).render(
        now=moment(now),
        version=__version__,
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
        **values,
    )


def publish(page: Path, text: str, opener: Callable[[str, int], int] | None = owners, option: str = "--output") -> Path:
    """Write a page, replacing an existing one atomically. ``opener``: as in ``write_text``; logs and job files are private.
    ``option``: the option that names another file. Raises HpcMpError if the page cannot be written."""
    try:
        write_text(page, text, opener)
    except OSError as error:
        raise HpcMpError(f"page {page}", f"cannot be written ({error.strerror})",
                         f"free space there, or pass another file with {option}") from None
    return page
