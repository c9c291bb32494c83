"""Rules on the start, confinement, end and requeuing of jobs."""

from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule, Severity
from hpc_mp.lint.slurm_conf.config import SlurmFacts

GRACE_S = 120
"""Seconds that hpc-mp's ranks have to save (checkpoint.grace, slurm.grace by default)."""

SHORT_KILL_S = 30
"""Slurm's own default of KillWait."""

LATE_S = 600
"""Seconds from which an unnoticed dead node costs more than a restart; Slurm's default is 300."""

Judge = Callable[[SlurmFacts], str | Iterable[str]]
"""Function that returns the wrong settings as subjects of findings: one, "" for none, or several."""


def rule(code: str, severity: Severity, judge: Judge, message: str, fix: str) -> Rule[SlurmFacts]:
    """Return the rule of a judge."""
    def find(facts: SlurmFacts) -> Iterator[Hit]:
        wrong = judge(facts)
        yield from (Hit(subject=subject) for subject in ([wrong] if isinstance(wrong, str) else wrong) if subject)
    return Rule(code, severity, find, message, fix)


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


_ADMIN = "slurm.conf: "
RULES: tuple[Rule[SlurmFacts], ...] = (
    rule("task-plugin", "warning", _lacks("TaskPlugin", "task/cgroup", "task/affinity", "cgroup", "affinity"),
         "Slurm neither binds tasks to processors nor confines them: ranks share one core, or run far from their GPU's socket",
         _ADMIN + "TaskPlugin=task/cgroup,task/affinity"),
    rule("proctrack", "warning", has_value("ProctrackType", "proctrack/linuxproc", "proctrack/pgid"),
         "Slurm misses leftover processes of a job (a hung rank, a data loader), which keep GPU memory and ports from the next "
         "job",
         _ADMIN + "ProctrackType=proctrack/cgroup"),
    rule("constrain-cores", "warning", _fence("ConstrainCores"),
         "jobs on one node take each other's processors: ranks slow down without a visible reason",
         "cgroup.conf: ConstrainCores=yes"),
    rule("constrain-devices", "warning", _fence("ConstrainDevices", gpus_only=True),
         "every job sees every GPU of the node, and a leftover process holds memory of another job's GPU",
         "cgroup.conf: ConstrainDevices=yes"),
    rule("constrain-memory", "info", _fence("ConstrainRAMSpace"),
         "a job that uses too much memory ends other jobs, not itself",
         "cgroup.conf: ConstrainRAMSpace=yes"),
    rule("memlock", "warning", _memlock,
         "the job inherits the login node's limit on locked memory; if that is 64 KiB, RDMA cannot register memory, and "
         "NCCL fails or falls back to TCP",
         _ADMIN + "PropagateResourceLimitsExcept=MEMLOCK instead of PropagateResourceLimits, and LimitMEMLOCK=infinity for "
         "slurmd"),
    rule("kill-wait", "warning", _lasts("KillWait", lambda wait: wait < SHORT_KILL_S),
         f"after scancel or preemption, ranks are killed before they have saved (they need {GRACE_S} s)",
         _ADMIN + f"KillWait={GRACE_S}"),
    rule("slurmd-timeout", "warning", _lasts("SlurmdTimeout", lambda timeout: timeout == 0 or timeout >= LATE_S),
         "a dead node is noticed late or never: until then, the job keeps all its other nodes",
         _ADMIN + "SlurmdTimeout=300 or less; hpc-mp's own heartbeat (job.heartbeat_timeout) ends its jobs earlier"),
    rule("return-to-service", "warning", has_value("ReturnToService", "2"),
         "a node that failed and restarted gets jobs at once, even if the fault persists",
         _ADMIN + "ReturnToService=1, or a HealthCheckProgram that checks the node first (`hpc-mp doctor install`)"),
    rule("no-requeue", "warning", has_value("JobRequeue", "0"),
         "a job is not requeued after a node failure unless it has --requeue (hpc-mp's scripts do)",
         _ADMIN + "JobRequeue=1"),
    rule("prolog-late", "warning", _prolog,
         "a node's prolog runs at the first step, within srun's time, not at the allocation: a slow prolog looks like a hung "
         "start",
         _ADMIN + "PrologFlags=Alloc,Contain"),
    rule("preempt-signal", "info", _no_warning,
         "preemption sends SIGTERM, not the signal in --signal; hpc-mp saves on both, other programs may not",
         _ADMIN + "PreemptParameters=send_user_signal; in 22.05 SlurmctldParameters=preempt_send_user_signal"),
)
