"""Classification of the output of programs, where native libraries and daemons write in words of their own."""

import re

from hpc_mp.diagnosis.texts import kind_of

# (kind, pattern) of lines of native libraries and daemons. They are tried before ``texts``: an errno in them has another meaning.
# Sources: slurmstepd's cgroup plugins; UCX' ib_mlx5_log.c and ucp; the plugins of MPICH and AWS for libfabric; libibverbs, where
# lack of memory is the limit on locked memory; ROCm's runtime; huggingface_hub's downloads; cuda.h and cudaGetErrorString, as
# numba, JAX and TensorFlow write them; Unified Runtime and Level Zero of Intel.
NATIVE: tuple[tuple[str | None, re.Pattern[str]], ...] = tuple((kind, re.compile(text)) for kind, text in (
    (None, r"slurmstepd\S*: error: .*(/sys/fs/cgroup|\bx?cgroup\w*_\w+: )"),  # a complaint about itself, often harmless
    (None, r"failed call to cuInit: CUDA_ERROR_NO_DEVICE"),  # TensorFlow writes it on every node without GPUs
    ("unfit", r"slurmstepd\S*: error: .*exiting abnormally"),
    ("network", r"(Transport|RNR) retry (count|counter) exceeded|(Local|Remote) [\w ]+ error on \w+:\d|"
                r"\buc[pst]_\w+(\([^)]*\))? failed|ucx function returned with failed status"),
    ("network", r"OFI poll failed|\bOFI \w+ failed|NET/OFI .*(completed with error|\bRC: ?\d)|\bfi_cq_readerr\b"),
    ("network", r"\bibv_(exp_)?(reg_\w*mr|create_(cq|qp|srq))\w*(\([^)]*\))? failed"),
    ("network", r"Consistency check failed: file should be of size"),
    ("hardware", r"HW Exception by GPU|Driver/library version mismatch"),
    ("hardware", r"cuda runtime error \(((46|100|214|304|80[2-7]|999)\)|\d+\) : unknown error)|\bhipError(NoDevice|Unknown)\b|"
                 r"\[(304|80[2-7]|999)\] Call to \w+ results in|UNKNOWN_CUDA_ERROR \((304|80[2-7]|999)\)|"
                 r"(?<!')CUDA_ERROR_(UNKNOWN|NO_DEVICE|DEVICE_UNAVAILABLE|OPERATING_SYSTEM|COMPAT_NOT_\w+|MPS_\w+)\b|"
                 r"(?<!')cudaError(Unknown|NoDevice|DevicesUnavailable|OperatingSystem|CompatNot\w+|Mps\w+)\b|"
                 r"forward compatibility was attempted on non supported HW|OS call failed or operation not supported on this OS|"
                 r"MPS client failed to connect"),
    ("space", r"no space left on device|disk quota exceeded|\bENOSPC\b"),  # of Go and Julia
    ("storage", r": input/output error\b"),
    ("memory", r"forrtl: severe \(41\)|Error allocating \d+ bytes|insufficient virtual memory|NODE_OUT_OF_MEMORY|"
               r"memory pressure \(OOM\)"),
    ("crash", r"forrtl: severe \(174\): SIGSEGV"),
    ("peer", r"Horovod has been shut down\. This was caused by an exception on one of the ranks"),
    ("memory", r"(?i:cuda)\w*\b.*\bError 2: out of memory"),
    ("memory", r"\b(UR_RESULT|PI|ZE_RESULT)_ERROR_OUT_OF_(DEVICE_MEMORY|HOST_MEMORY|RESOURCES)\b"),
))


def kind_in_output(text: str) -> str | None:
    """Return the kind of failure that a program's output reports; None for output without one."""
    native = next(((kind,) for kind, pattern in NATIVE if pattern.search(text)), None)
    return kind_of(text) if native is None else native[0]
