"""The page of a survey in a real browser: its figures are drawn, what is bad is named, and nothing sticks out."""

from pathlib import Path

import pytest
from browser import needs_browser, opened
from survey_paper import Faults, made

from hpc_mp.doctor.survey.page import write_page

pytestmark = [pytest.mark.prove, needs_browser]


@pytest.mark.parametrize("width", [1280, 700])
def test_the_figures_are_drawn_and_fit(tmp_path: Path, width: int) -> None:
    write_page(tmp_path / "doctor.html", made(Faults(node_rate={2: 0.4})))
    page = opened(tmp_path / "doctor.html", width)
    assert page.complaints == ()
    assert [kind for kind, *_ in page.figures].count("svg") == 2 and any(kind == "tree" for kind, *_ in page.figures)
    assert all(wide > 100 and high > 20 for _, wide, high in page.figures), page.figures
    assert not page.overflows
    assert "n3" in page.text and "healthy" not in page.text.splitlines()[0]


def test_an_empty_figure_would_be_seen(tmp_path: Path) -> None:
    file = tmp_path / "doctor.html"
    write_page(file, made(Faults()))
    assert opened(file).text.splitlines()[0].endswith("healthy")
    file.write_text(file.read_text(encoding="utf-8").replace("<svg", '<svg style="height: 0"'), encoding="utf-8")
    assert not all(high > 20 for _, _, high in opened(file).figures)
