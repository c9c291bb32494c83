"""Random faults on six hosts: runs that end by themselves with the numbers of an undisturbed one (see `campaign`)."""

import pytest
from campaign import Planted, campaign, summary, wrong_end
from tables import table

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


@pytest.mark.parametrize(("end", "words"), table(__file__, "campaign_slurm.toml", "ends"))
def test_an_end_must_name_a_host_that_was_hit(end: dict[str, object], words: str) -> None:
    hit = [Planted("host dies", "step", ("n2",), 0.0, 12, 1), Planted("requeued", "step", (), 300.0, 12, 3),
           Planted("slurmctld killed", "step", (), 900.0, 12, 5)]
    wrong = wrong_end({"attempt": 1, "time": 600.0, "node": None, **end}, hit)
    assert words in "".join(wrong) and bool(words) == bool(wrong)
