"""Pictures of a run as one HTML file, from its run directory alone."""

from hpc_mp.report.page import write_report

__all__ = ["write_report"]
