"""Random faults on six hosts: runs that end by themselves with the numbers of an undisturbed one (see `campaign`)."""

import pytest
from campaign import Planted, campaign, summary, wrong_end

Capture = pytest.CaptureFixture[str]


@pytest.mark.prove
@pytest.mark.timeout(3600)
@pytest.mark.parametrize(("kind", "faults"), [("engine", 20), ("program", 12)])
def test_runs_complete_with_the_same_bits_after_random_faults(kind: str, faults: int, capsys: Capture) -> None:
    trials = campaign(faults, seed=5, kind=kind)
    with capsys.disabled():
        print(f"\n{summary(trials)}")
    assert not [words for trial in trials for words in trial.wrong], summary(trials)
    assert sum(len(trial.planted) for trial in trials) >= 0.7 * faults


@pytest.mark.parametrize(("end", "words"), [
    ({"kind": "stopped", "node": None, "nodes": [], "message": "stopped"}, "nobody asked"),
    ({"attempt": 3, "kind": "stopped", "node": None, "nodes": [], "message": "stopped"}, ""),
    ({"attempt": 4, "kind": "lost", "node": "n2", "nodes": ["n2"], "message": "n2 lost contact"}, "misnamed"),  # long ago
    ({"attempt": 4, "time": 100.0, "kind": "signal", "node": "n2", "nodes": [], "message": "n2 killed"}, ""),  # by Slurm, late
    ({"kind": "lost", "node": "n2", "nodes": ["n2"], "message": "n2 lost contact"}, ""),
    ({"kind": "lost", "node": "n3", "nodes": ["n3"], "message": "n3 lost contact"}, "misnamed"),
    ({"kind": "vanished", "node": None, "nodes": [], "message": "the ranks have vanished"}, "unnamed"),
    ({"kind": "unknown", "node": None, "nodes": [], "message": "something about n2"}, "")])
def test_an_end_must_name_a_host_that_was_hit(end: dict[str, object], words: str) -> None:
    hit = [Planted("host dies", "step", ("n2",), 0.0, 12, 1), Planted("requeued", "step", (), 300.0, 12, 3)]
    wrong = wrong_end({"attempt": 1, "time": 600.0, **end}, hit)
    assert words in "".join(wrong) and bool(words) == bool(wrong)
