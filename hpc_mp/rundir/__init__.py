"""The run directory: the files through which the control half and the ranks communicate."""

from hpc_mp.base.files import cut_metrics, read_json, read_lines, sync, write_json, write_text
from hpc_mp.base.line_file import LineFile
from hpc_mp.rundir.attempt import SECRET, TOKEN, AttemptRecord, read_attempt, write_attempt
from hpc_mp.rundir.checkpoints import Manifest, newest_complete, problem, write_manifest
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.runs import create_run, find_run, prepare_resume

__all__ = [
    "SECRET", "TOKEN", "AttemptRecord", "LineFile", "Manifest", "RunDirectory", "create_run", "cut_metrics", "find_run",
    "newest_complete", "prepare_resume", "problem", "read_attempt", "read_json", "read_lines", "sync",
    "write_attempt", "write_json", "write_manifest", "write_text",
]
