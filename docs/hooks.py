"""What the site shows otherwise than GitHub: links from a page to a file of the repository outside docs/, in whose place its path
stands, bars in code within tables, which GitHub alone wants to be escaped, and commands apart from what they print."""

import re
from html import escape
from itertools import groupby
from typing import Any

PAGES = "admin/|user/|how-it-works/|reference/|tutorial|troubleshooting|index"
OUTSIDE = re.compile(rf"\[([^\]]*)\]\((?:\.\./)+(?!{PAGES})([^)#]*)(#[^)]*)?\)")


CODE = re.compile(r"`[^`\n]*`")
CONSOLE = re.compile(r"^    \$ .*\n(?:    .*\n|\n(?=    ))*", re.MULTILINE)
HEREDOC = re.compile(r"<<'?(\w+)'?")


def console(block: str) -> list[tuple[bool, str]]:
    """The parts of a block in their order: whether it is what is typed, without prompts, and its text."""
    lines, end = [], ""
    for line in block.rstrip("\n").split("\n"):
        text, typed = line[4:].removeprefix("$ "), line.startswith("    $ ") or end != ""
        lines.append((typed, text))
        if end in ("", "\\", text):  # outside of a heredoc
            heredoc = HEREDOC.search(text) if typed and text != end else None
            end = heredoc[1] if heredoc else "\\" if typed and text.endswith("\\") else ""
    return [(typed, "\n".join(text for _, text in part).strip("\n")) for typed, part in groupby(lines, lambda line: line[0])]


def _apart(found: re.Match[str]) -> str:
    shown, before = "", ""
    for typed, text in console(found[0]):
        copied = typed or before.startswith("cat ")  # a file is for the reader to have
        shown += f"\n<pre{'' if copied else ' class=no-copy'}><code>{escape(text)}\n</code></pre>\n" if text else ""
        before = text.rpartition("\n")[2]
    return shown + "\n"


def on_page_markdown(markdown: str, **_: Any) -> str:
    """Called by mkdocs for every page."""
    shown = CODE.sub(lambda found: found[0].replace(r"\|", "|"), OUTSIDE.sub(r"\1 (`\2`)", markdown))
    return CONSOLE.sub(_apart, shown)
