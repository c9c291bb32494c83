"""Links from a page to a file of the repository outside docs/: on the site the file's path stands in their place."""

from __future__ import annotations

import re
from typing import Any

PAGES = "admin/|user/|how-it-works/|reference/|tutorial|troubleshooting|index"
OUTSIDE = re.compile(rf"\[([^\]]*)\]\((?:\.\./)+(?!{PAGES})([^)#]*)(#[^)]*)?\)")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return OUTSIDE.sub(r"\1 (`\2`)", markdown)
