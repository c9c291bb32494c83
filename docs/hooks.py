"""What the site shows otherwise than GitHub: links from a page to a file of the repository outside docs/, in whose place its path
stands, and the bars in code within tables, which GitHub alone wants to be escaped."""

from __future__ import annotations

import re
from typing import Any

PAGES = "admin/|user/|how-it-works/|reference/|tutorial|troubleshooting|index"
OUTSIDE = re.compile(rf"\[([^\]]*)\]\((?:\.\./)+(?!{PAGES})([^)#]*)(#[^)]*)?\)")


CODE = re.compile(r"`[^`\n]*`")


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    return CODE.sub(lambda found: found[0].replace(r"\|", "|"), OUTSIDE.sub(r"\1 (`\2`)", markdown))
