"""Rules on the start, confinement, end and requeuing of jobs."""

from collections.abc import Callable, Iterable, Iterator, Mapping

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.rule_table import rules_of
from hpc_mp.lint.slurm_conf.config import SlurmFacts

GRACE_S = 120
"""Seconds that hpc-mp's ranks have to save (checkpoint.grace, slurm.grace by default)."""

SHORT_KILL_S = 30
"""Slurm's own default of KillWait."""

LATE_S = 600
"""Seconds from which an unnoticed dead node costs more than a restart; Slurm's default is 300."""

Judge = Callable[[SlurmFacts], str | Iterable[str]]
"""Function that returns the wrong settings as subjects of findings: one, "" for none, or several."""


def rules(judges: Mapping[str, Judge]) -> tuple[Rule[SlurmFacts], ...]:
    """Return the rules of these judges."""
    def finder(judge: Judge) -> Callable[[SlurmFacts], Iterator[Hit]]:
        def find(facts: SlurmFacts) -> Iterator[Hit]:
            wrong = judge(facts)
            yield from (Hit(subject=subject) for subject in ([wrong] if isinstance(wrong, str) else wrong) if subject)
        return find

    return rules_of("slurm/conf-rules.toml", {code: finder(judge) for code, judge in judges.items()})


def has_value(key: str, *wrong: str) -> Judge:
    """Make a judge of a setting that Slurm shows with a lower-case value in ``wrong``."""
    return lambda facts: facts.shown(key) if key in facts.config and facts.says(key).lower() in wrong else ""


def _lacks(key: str, *flags: str) -> Judge:
    """Make a judge of a setting that Slurm shows with none of the flags."""
    return lambda facts: facts.shown(key) if key in facts.config and not set(flags) & set(facts.listed(key)) else ""


def _lasts(key: str, wrong: Callable[[int], bool]) -> Judge:
    """Make a judge of a setting whose seconds are wrong."""
    return lambda facts: f"{key}={wait} s" if (wait := facts.seconds(key)) is not None and wrong(wait) else ""


def _fence(key: str, gpus_only: bool = False) -> Judge:
    def judge(facts: SlurmFacts) -> str:
        if facts.cgroup is None or "task/cgroup" not in facts.listed("TaskPlugin") or (gpus_only and not facts.gpu_nodes):
            return ""
        value = next((value for name, value in facts.cgroup.items() if name.lower() == key.lower()), "no")
        return f"cgroup.conf: {key}={value or 'no'}" if value.lower() != "yes" else ""
    return judge


def _memlock(facts: SlurmFacts) -> str:
    """Return the setting that propagates memlock. Slurm uses only one of the two settings."""
    exceptions = facts.listed("PropagateResourceLimitsExcept")
    if exceptions:
        return "" if {"all", "memlock"} & set(exceptions) else facts.shown("PropagateResourceLimitsExcept")
    return facts.shown("PropagateResourceLimits") if {"all", "memlock"} & set(facts.listed("PropagateResourceLimits")) else ""


def _prolog(facts: SlurmFacts) -> str:
    has = any(value for key, value in facts.config.items() if key.partition("[")[0] == "Prolog")
    early = {"alloc", "contain", "x11"} & set(facts.listed("PrologFlags"))  # the other two imply Alloc
    return facts.shown("PrologFlags") if has and not early else ""


def _no_warning(facts: SlurmFacts) -> str:
    preempts = facts.says("PreemptType") not in ("", "preempt/none")
    warns = "send_user_signal" in facts.says("PreemptParameters") + facts.says("SlurmctldParameters")
    return f"{facts.shown('PreemptType')} without send_user_signal" if preempts and not warns else ""


RULES: tuple[Rule[SlurmFacts], ...] = rules({
    "task-plugin": _lacks("TaskPlugin", "task/cgroup", "task/affinity", "cgroup", "affinity"),
    "proctrack": has_value("ProctrackType", "proctrack/linuxproc", "proctrack/pgid"),
    "constrain-cores": _fence("ConstrainCores"),
    "constrain-devices": _fence("ConstrainDevices", gpus_only=True),
    "constrain-memory": _fence("ConstrainRAMSpace"),
    "memlock": _memlock,
    "kill-wait": _lasts("KillWait", lambda wait: wait < SHORT_KILL_S),
    "slurmd-timeout": _lasts("SlurmdTimeout", lambda timeout: timeout == 0 or timeout >= LATE_S),
    "return-to-service": has_value("ReturnToService", "2"),
    "no-requeue": has_value("JobRequeue", "0"),
    "prolog-late": _prolog,
    "preempt-signal": _no_warning,
})
