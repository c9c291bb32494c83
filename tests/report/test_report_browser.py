"""A report in a real browser: its figures are drawn, its scripts run under its own policy, and nothing sticks out."""

from pathlib import Path

import pytest
from browser import needs_browser, opened
from reported import Run

from hpc_mp.report.page import write_report

pytestmark = [pytest.mark.prove, needs_browser]


@pytest.fixture
def report(tmp_path: Path) -> Path:
    """Of a run that failed in its second attempt."""
    run = Run(tmp_path, steps=12).complete()
    run.resume(8)
    run.start()
    run.train(9, 10)
    run.trace()
    run.fail(3, "error", "ValueError: boom & <b>bang</b>")
    run.status("stopped")
    return write_report(run.run)


@pytest.mark.parametrize("width", [1280, 700])
def test_the_figures_are_drawn_and_fit(report: Path, width: int) -> None:
    page = opened(report, width)
    assert page.complaints == ()
    kinds = [kind for kind, *_ in page.figures]
    assert kinds.count("curve") == 5 and "nodes" in kinds and len(kinds) >= 7, kinds
    assert all(wide > 100 and high > 20 for _, wide, high in page.figures), page.figures
    assert not page.overflows
    assert "ValueError: boom & <b>bang</b>" in page.text and "loss" in page.text.lower()


def test_a_spoilt_script_and_a_wide_figure_would_be_seen(report: Path) -> None:
    whole = report.read_text(encoding="utf-8")
    report.write_text(whole.replace('"use strict";', '"use strict"; nothing();'), encoding="utf-8")
    assert any("Content Security Policy" in line for line in opened(report).complaints), "its policy knows the script's hash"
    wide = '<svg style="min-width: 3000px; width: 3000px" height="30"></svg><h1>'
    report.write_text(whole.replace("<h1>", wide), encoding="utf-8")
    assert opened(report).overflows
    report.write_text(whole.replace("<svg", '<svg width="0" style="width: 0; height: 0"'), encoding="utf-8")
    assert not all(wide > 100 for _, wide, _ in opened(report).figures)
