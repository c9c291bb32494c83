"""The program that stands in for every program of a script: it records what it got, and ends with a code that a seed draws.

It is copied into a sandbox, where links with the names of programs lead to it, and needs nothing but Python itself. Some
names become the real program: Slurm's own for hpc-mp, `date` of a fixed moment, `rm` inside the sandbox, a plain `mpirun`.
"""

import os
import select
import sys
import time
import zlib

MOST_INPUT = 1 << 14  # bytes of standard input that are recorded
MOST = 300  # recordings of a job, beyond which it is cancelled
MOST_RANKS = 4  # of one mpirun
REAL = ("/usr/bin", "/bin", "/usr/sbin", "/sbin", "/usr/local/bin")
SLURM = ("sbatch", "salloc", "scancel", "scontrol", "squeue", "sinfo", "sacct", "sacctmgr", "sstat", "sprio", "sshare", "sreport",
         "sattach", "sbcast", "strigger", "sdiag", "scrontab")
MPIRUNS = ("mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "prun")
CODES = (1, 2, 3, 9, 42)


def main() -> int:
    sandbox = os.path.dirname(os.path.realpath(__file__))
    name, words = os.path.basename(sys.argv[0]), sys.argv[1:]
    if (arguments := real_arguments(sandbox, name, words)) is not None:
        for place in REAL:
            if os.access(f"{place}/{name}", os.X_OK):
                os.execv(f"{place}/{name}", [name, *arguments])
        print(name)
        return 0
    record(sandbox, name, words)
    if name in MPIRUNS:
        return mpirun(sandbox, words)
    if name == "sleep":
        time.sleep(0.02)
        return 0
    print(name, *words[:3])
    return drawn(sandbox, name, words)


def real_arguments(sandbox: str, name: str, words: list[str]) -> list[str] | None:
    """Return the arguments with which the real program is called instead; None to record the call."""
    if by_hpc_mp() or (name in SLURM and "SLURM_JOB_ID" not in os.environ):
        return words
    if name == "scontrol" and words[:1] == ["show"] and words[1:2] and words[1].startswith("hostn"):
        return words
    if name == "date":
        fixed = any(word.startswith(("-d", "--date", "-r", "--reference", "-f", "--file")) for word in words)
        return words if fixed else ["--utc", "--date=@1750000000", *words]
    if name == "rm":
        inside = [word for word in words if word.startswith("-") or os.path.realpath(word).startswith(f"{sandbox}/work/")]
        return [*inside, "-f"]
    return None


def by_hpc_mp() -> bool:
    """Return True if hpc-mp itself is the caller, and not a program of the script: its nearest relative decides."""
    pid = os.getppid()
    for _ in range(6):
        try:
            with open(f"/proc/{pid}/cmdline", "rb") as file:
                words = file.read().split(b"\0")
            with open(f"/proc/{pid}/stat", "rb") as file:
                pid = int(file.read().rpartition(b")")[2].split()[1])
        except OSError:
            return False
        if b"hpc_mp.program.witness" in words:
            return False
        if any(word.startswith(b"slurm/node-") or word.split(b".")[0] == b"hpc_mp" for word in words):
            return True
    return False


def status() -> dict[str, str]:
    """Return the signals that this process ignores and blocks, as Python leaves them, and its mask of files."""
    with open("/proc/self/status") as file:
        lines = dict(line.rstrip("\n").split(":\t", 1) for line in file if ":\t" in line)
    return {key: lines.get(key, "") for key in ("SigIgn", "SigBlk", "Umask")}


def record(sandbox: str, name: str, words: list[str]) -> None:
    read = b""
    files = sorted(int(number) for number in os.listdir("/proc/self/fd") if int(number) > 2 and exists(number))
    if not os.isatty(0) and readable(0):
        while len(read) < MOST_INPUT and select.select([0], [], [], 5)[0]:
            block = os.read(0, MOST_INPUT)
            if not block:
                break
            read += block
    place = f"{sandbox}/seen"
    recording = {
        "name": name, "words": words, "directory": os.getcwd(), "variables": dict(os.environ), "input": read[:MOST_INPUT],
        "step": os.environ.get("SLURM_STEP_ID", ""), "host": os.uname().nodename, "status": status(), "files": files,
        "rank": os.environ.get("OMPI_COMM_WORLD_RANK", os.environ.get("SLURM_PROCID", ""))}
    with open(f"{place}/{time.time_ns()}-{os.uname().nodename}-{os.getpid()}", "x") as file:
        file.write(ascii(recording))
    if len(os.listdir(place)) > MOST and "SLURM_JOB_ID" in os.environ:
        os.execv("/usr/bin/scancel", ["scancel", os.environ["SLURM_JOB_ID"]])


def exists(number: str) -> bool:
    try:
        return "/proc/" not in os.readlink(f"/proc/self/fd/{number}")
    except OSError:
        return False


def readable(number: int) -> bool:
    try:
        select.select([number], [], [], 0)
        os.read(number, 0)
    except OSError:
        return False
    return True


def drawn(sandbox: str, name: str, words: list[str]) -> int:
    """Return the exit code: always 0 with the seed 0. Paths and numbers in the arguments do not matter."""
    with open(f"{sandbox}/seed") as file:
        seed = int(file.read())
    plain = "".join(letter for letter in ascii((name, [word for word in words if "/" not in word])) if not letter.isdigit())
    number = zlib.crc32(f"{seed} {plain} {os.environ.get('SLURM_PROCID')}".encode())
    return CODES[number // 100 % len(CODES)] if seed and number % 100 < 12 else 0


def mpirun(sandbox: str, words: list[str]) -> int:
    """Start the ranks of each program on this host, with Open MPI's variables."""
    with open(f"{sandbox}/mpirun-options") as file:
        values: dict[str, int] = eval(file.read())
    tasks: list[list[str]] = []
    while words:
        end = words.index(":") if ":" in words else len(words)
        part, words, count = words[:end], words[end + 1:], 2
        while part and part[0].startswith("-"):
            option, _, value = part.pop(0).lstrip("-").partition("=")
            taken = [part.pop(0) for _ in range(0 if value else values.get(option, 0)) if part]
            if option in ("n", "np", "c") and "".join([value, *taken]).isdecimal():
                count = int("".join([value, *taken]))
        tasks += [part] * min(count, MOST_RANKS) if part else []
    pids = []
    for number, task in enumerate(tasks):
        pid = os.fork()
        if pid == 0:
            if number:
                os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
            os.environ |= {"OMPI_COMM_WORLD_RANK": str(number), "OMPI_COMM_WORLD_SIZE": str(len(tasks)),
                           "OMPI_COMM_WORLD_LOCAL_RANK": str(number)}
            try:
                os.execvp(task[0], task)
            except OSError:
                os._exit(2)  # as of hpc-mp's witness: each Open MPI has a code of its own for it
        pids.append(pid)
    codes = [os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) for pid in pids]
    return max((code if code >= 0 else 128 - code for code in codes), default=1)


if __name__ == "__main__":
    sys.exit(main())
