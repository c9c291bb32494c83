"""A strict reader of our HTML pages."""

from html.parser import HTMLParser

VOID = {"meta", "br", "img", "input", "hr", "link", "base", "source", "embed"}


class Page(HTMLParser):
    """A page parsed strictly: every element is closed where it must be, by its own end tag.

    ``found``: (tag, attributes) in order; ``text``: what a reader sees, styles and scripts left out.
    """

    def __init__(self, source: str) -> None:
        super().__init__(convert_charrefs=True)
        self.source = source
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.open: list[str] = []
        self.words: list[str] = []
        self.feed(source)
        self.close()
        assert self.open == [], f"never closed: {self.open}"

    @property
    def text(self) -> str:
        return " ".join(" ".join(self.words).split())

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        assert len({key for key, _ in attrs}) == len(attrs), f"<{tag}> has an attribute twice"
        self.found.append((tag, dict(attrs)))
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))

    def handle_endtag(self, tag: str) -> None:
        assert self.open and self.open[-1] == tag, f"</{tag}> inside {self.open}"
        self.open.pop()

    def handle_data(self, data: str) -> None:
        if not self.open or self.open[-1] not in ("style", "script"):
            self.words.append(data)

    def all(self, tag: str, **attributes: str) -> list[dict[str, str | None]]:
        wanted = {key.rstrip("_").replace("_", "-"): value for key, value in attributes.items()}
        return [given for name, given in self.found
                if name == tag and all(value in (given.get(key) or "").split() for key, value in wanted.items())]
