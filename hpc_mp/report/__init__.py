"""Pictures and HTML from a run directory."""

from hpc_mp.report.page import write_report

__all__ = ["write_report"]
