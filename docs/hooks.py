"""What the site shows otherwise than GitHub: links from a page to a file of the repository outside docs/, in whose place its path
stands, bars in code within tables, which GitHub alone wants to be escaped, and commands apart from what they print. It also packs
the planner that runs in a browser."""

import re
from html import escape
from itertools import groupby
from pathlib import Path
from typing import Any
from zipfile import ZIP_DEFLATED, ZipFile

PAGES = "admin/|user/|how-it-works/|planner/|reference/|tutorial|troubleshooting|index"
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


ROOMS = ("base", "catalogue", "cli", "cluster", "diagnosis", "job", "layout", "planner", "report", "rundir")  # for planning
ROOT = Path(__file__).resolve().parents[1]


def pack(archive: Path) -> None:
    """Write what docs/planner runs in a browser: the rooms that planning imports, placed as in a wheel, and ``answer.py``."""
    files = [ROOT / "hpc_mp/__init__.py", *(file for room in ROOMS for file in sorted((ROOT / "hpc_mp" / room).rglob("*.*")))]
    with ZipFile(archive, "w", ZIP_DEFLATED) as packed:
        packed.write(ROOT / "docs/planner/answer.py", "answer.py")
        for file in files:
            if file.suffix != ".pyc":
                packed.write(file, file.relative_to(ROOT))
        for file in sorted((ROOT / "env").rglob("*.toml")):
            packed.write(file, Path("hpc_mp/_assets", file.relative_to(ROOT)))


def on_post_build(config: Any, **_: Any) -> None:
    """Called by mkdocs when the site is written."""
    pack(Path(config["site_dir"], "planner", "hpc_mp.zip"))
