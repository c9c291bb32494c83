"""Classification of a text by the kind of failure that it reports: the rows of ``env/failure-texts.toml``.

They are read on import: a rank that classifies its own failure may be unable to open a file.
"""

import re

from hpc_mp.base.assets import asset_table

FILE = "env/failure-texts.toml"
_ERRNO = re.compile(r"<errno ([^>]*)>")


# Kind and pattern; kind None: the text only mentions a name.
NATIVE, TEXTS = (
    tuple((row.get("kind"), re.compile("|".join(
        _ERRNO.sub(lambda match: rf"(?:\[Errno |errno ?= ?|\(os error )(?:{match[1]})\b", sign) for sign in row["signs"])))
          for row in asset_table(FILE)[name])
    for name in ("native", "text"))

# Echoes of ranks that waited for a rank that was alive.
TIMED_OUT = re.compile(r"[Tt]imed? ?out|failed to pass monitoredBarrier|(missing|sending) heartbeats")


def kind_of(text: str) -> str | None:
    """Return the kind of failure that a text reports; None for a text without one."""
    return next((kind for kind, pattern in TEXTS if pattern.search(text)), None)


def kind_in_output(text: str) -> str | None:
    """Return the kind of failure that a program's output reports, in which native libraries and daemons write in words of their
    own; None for output without one."""
    return next((kind for kind, pattern in (*NATIVE, *TEXTS) if pattern.search(text)), None)
