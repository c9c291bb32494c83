"""Pictures and HTML from a run directory."""

from hpc_mp.report.conclude import conclude
from hpc_mp.report.page import write_report

__all__ = ["conclude", "write_report"]
