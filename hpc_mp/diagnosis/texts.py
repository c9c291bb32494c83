"""Classification of a text by the kind of failure that it reports."""

import re

# (kind, pattern of a text that reports it); kind None: the text only mentions a name. The first match counts. Lines of
# slurmstepd: Slurm 22.05's sources and recorded ends of jobs; of the kernel: mm/oom_kill.c; of CUDA: cudaGetErrorString; of
# NCCL, gloo and torch: their sources. The numbers are Linux's errno, as Python, HDF5 and Rust write them, because the texts are
# in the user's language.
_ERRNO = r"(?:\[Errno |errno ?= ?|\(os error )(?:%s)\b"
TEXTS: tuple[tuple[str | None, re.Pattern[str]], ...] = tuple((kind, re.compile(text)) for kind, text in (
    (None, r"\bhas no attribute '|cannot import name '|name '\w+' is not defined|^KeyError: "),
    ("network", r"ibv_reg_mr\w* failed"),  # "Cannot allocate memory" here means the limit on locked memory
    ("memory", r"exceeded (virtual )?memory limit \(\d+ > \d+\), being killed"),
    ("memory", r"Exceeded (job|step) memory limit"),
    ("memory", r"Detected \d+ oom[-_]kill event"),
    ("memory", r"Out of memory: Kill|Memory cgroup out of memory|invoked oom-killer|oom-kill:constraint"),
    ("memory", r"memory\.events oom_kill [1-9]"),
    ("memory", r"(?<!\w)(torch\.|torch\.cuda\.)?OutOfMemoryError\b|"
               r"(?i:\b(cuda|gpuassert|hip|rocm|xpu|npu|mps)\w*\b.{0,60}\bout of memory\b|out of gpu memory)|"
               r"parallel_for failed: out of memory|Failed to CUDA (host )?[cm]alloc"),
    ("memory", r"(jax|tensorflow|onnxruntime).*[Ff]ailed to allocate (memory|\d+ bytes)|No available memory for the cache|"
               r"Free memory on device .* is less|\w_ALLOC_FAILED|StatusAllocFailed|cudaErrorMemoryAllocation|"
               r"(CUDA|HIP)_?(ERROR_OUT_OF_MEMORY|ErrorOutOfMemory)|OOM when allocating|"
               r"(?i:resource[_ ]exhausted: .{0,60}(out of memory|failed to allocate|attempting to reserve))"),
    ("memory", r"(?<!\w)(numpy\S*\.)?_?(Array|Arrow)?MemoryError\b|bad_alloc\b|(can't|[Cc]annot) allocate memory|"
               r"(Error: N|n)ot enough memory|memory allocation of \d+ bytes failed|" + _ERRNO % "12"),
    ("hardware", r"uncorrectable (ECC|NVLink) error|Uncorrectable ECC|fallen off the bus|GPU is lost|NVML: Driver/library|"
                 r"ECC_?UNCORRECTABLE|ECCUncorrectable|ECCNotCorrectable|NVMLError_(LibRm|ResetReq)|"
                 r"Unable to determine the device handle|NCCL error[\s\S]*Failed to bind NVLink SHARP"),
    ("hardware", r"GPU recovery action changed .* to 0x\w+ \((?!None)"),  # Xid 154
    ("hardware", r"no (CUDA|ROCm)-capable device is detected|No (CUDA|HIP) GPUs are available|busy or unavailable|"
                 r"(?i:\b(cuda|hip)\b.{0,20}\bunknown error)|CUDA driver initialization failed|"
                 r"Found no NVIDIA driver|over nvlink or a hardware error"),
    ("hardware", r"(?i:cuda|gpu).*\bError:? \(?(304|80[2-7]|999)\b|system not yet initialized|"
                 r"unsupported display driver / cuda driver|SYSTEM_NOT_READY|SystemNotReady|"
                 r"SYSTEM_DRIVER_MISMATCH|SystemDriverMismatch"),
    ("hardware", r"\bSXid\b.*\bFatal\b|Machine check events|\[Hardware Error\]"),
    ("space", r"No space left on device|Disk quota exceeded|failed to extend /dev/shm|out of shared memory|"
              r"insufficient shared memory|creating shared memory segment /dev/shm|unable to allocate shared memory|"
              r"[Nn]ot enough (free )?disk space|[Dd]isk is full|\d requested and \d+ written|" + _ERRNO % "28|122"),
    ("storage", r"Stale (NFS )?file handle|\bInput/output error|Structure needs cleaning|Remote I/O error|"
                r"Cannot send after (transport endpoint|socket) shutdown|"
                r"PytorchStreamWriter failed|iostream error|disk I/O error|inline_container\.cc.*unexpected pos"),
    ("storage", r"^(?!.*(\b(slurmstepd|srun)\S*: |Dist\w+Error|/gloo/)).*"
                r"(Transport endpoint is not connected|Read-only file system)"),  # Slurm's own failed attempts are harmless
    ("storage", _ERRNO % r"5|30|37|70|74|107|108|116|117|121|5[12]\d"),  # beyond 511: NFS's own errors, unknown to Linux
    ("storage", _ERRNO % r"19|6[12]|10[0-4]|11[0-3]" + r"[^:(]*: b?['\"]"),  # of a connection or device, of a named file
    ("signal", r"DataLoader worker \(pid.*\) is killed by signal: Killed"),
    ("peer", r"another task died|the coordinator task died|heartbeat timeout\. This indicates that the remote task"),  # of JAX
    ("network", r"\b(httpx|httpcore|aiohttp|botocore|requests|urllib3|http\.client)\.(\w+\.)*\w*(Timeout|Connect|Network|"
                r"(Read|Write)Error|Remote|Disconnect|Incomplete|Chunked|Payload)|EOF occurred in violation of protocol|"
                r"Timeout(Error)?: (The \w+ operation )?timed out$|[Cc]ouldn't reach (https?:|'.*' on the Hub)|"
                r"[Cc]ould not resolve host|Client error '429|Server error '50\d|HTTP Error (429|50\d)|: 50\d [A-Z]+ https?:|"
                r"\(SlowDown\)|Internet connection is on|Run initialization has timed out|communicating with wandb"),
    ("network", r"urlopen error|HTTPS?ConnectionPool|Max retries exceeded with url|failure in name resolution|"
                r"Name or service not known|No address associated with hostname|Remote end closed connection|"
                r"[Cc]heck your (internet )?connection|[Cc]ouldn't connect to|(429 Client|50\d Server) Error|\bUNAVAILABLE\b"),
    ("network", r"EADDRINUSE|[Aa]ddress already in use|Cannot assign requested address"),  # the next attempt has another port
    ("network", r"No route to host|Network is (unreachable|down)|Host is down|connection abort|Connection aborted|"
                + _ERRNO % r"99|10[0-3]|110|112|113"),
    ("network", r"Got completion from peer \S+ with status="),
    ("network", r"ncclSystemError|unhandled system error|ibv_\w+ failed"),
    ("peer", r"ProcessGroupNCCL's watchdog|due to collective timeout or exception|connect\(\) timed out"),
    ("peer", r"client socket has (failed|timed out)|Timed out after \d+ seconds waiting for clients|[Ww]ait timeout|"
             r"Socket Timeout|Timeout waiting for key|initializing process group in store.based barrier|Rendezvous\w*Error\b|"
             r"connect to the store|Did the remote server shutdown|[Ss]top_waiting response"),
    ("peer", r"Watchdog caught collective operation timeout|Timed out waiting|Application timeout caused pair closure|"
             r"ProcessGroup\w+ is aborted due to timeout|Barrier timed out|DEADLINE_EXCEEDED"),
    ("peer", r"connectFullMesh failed|failed to pass monitoredBarrier|Rank \d+ successfully reached monitoredBarrier"),
    ("peer", r"ncclRemoteError|remote process exited|NCCL communicator was aborted|Connection (was )?(closed|reset) by (remote )?"
             r"peer|MPI_ERR_PROC_\w+|" + _ERRNO % "32|104|111"),
    ("peer", r"Broken pipe|Socket closed|failed to recv, got 0 bytes|Connection refused|(Read|Write) error \["),
    ("network", r"Dist(Network|Store)Error"),  # any other error of torch on its way to the store
))

# Echoes of ranks that waited for a rank that was alive.
TIMED_OUT = re.compile(r"[Tt]imed? ?out|failed to pass monitoredBarrier|(missing|sending) heartbeats")


def kind_of(text: str) -> str | None:
    """Return the kind of failure that a text reports; None for a text without one."""
    return next((kind for kind, pattern in TEXTS if pattern.search(text)), None)
