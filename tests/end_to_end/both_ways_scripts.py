"""Job scripts that a seed draws: directives, launches of ranks, and all that bash can put around them."""

from __future__ import annotations

import random
from collections.abc import Callable

ARGUMENTS = (
    "--lr $LR", '--lr "$LR"', "'$HOME'", '"a b"', "''", "é", "*.txt", "{a,b}/x", "$((1 + 2))", "${UNSET:-default value}",
    '"${UNSET-}"',
    "$SLURM_NTASKS", "$SLURM_JOB_NUM_NODES", '"$TRICKY"', "$TRICKY", "--name=$SLURM_JOB_NAME", '"$(basename "$PWD")"',
    "`echo sub`",
    "-n 3", "--nodes", "\\$X", '"\\"q\\""', "${LR%e-4}", "$# $0x", '"$@"', "$RANK", "~/x", "a\\ b", "$'tab\\there'", "%j", "-- x")
PROGRAMS = ("train.sh", "python train.py", "python -u -m package.train", "./main", "simulate",
            "bash -c 'main of $SLURM_PROCID \"$0\"' zero", "sh -c 'main \"$0\"'")
DIRECTIVES = (
    "--job-name=drawn", "--job-name=\"two words\"", "--cpus-per-task=2", "--mem=2G", "--mem-per-cpu=100", "--exclusive",
    "--gres=gpu:2",
    "--gpus-per-node=1", "--time=10", "--time=0-01:00:00", "--signal=B:USR1@60", "--output=out-%j.txt", "--comment=\"a b\"",
    "--open-mode=append", "--no-requeue", "--requeue", "--export=ALL", "--mail-type=END", "-J short",
    "--distribution=cyclic", "-c 2",
    "--ntasks-per-node=2", "--hint=nomultithread", "--oversubscribe", "--kill-on-invalid-dep=yes",
    "--cpus-per-task 3  # a comment")
SIZES = ("--nodes=2\n#SBATCH --ntasks-per-node=2", "--nodes=2", "-N 1\n#SBATCH -n 3", "--ntasks=2", "-n 3",
         "--nodes=2\n#SBATCH --ntasks=3",
         "--nodes=2-2", "--nodes=2 --ntasks-per-node=1", "-N2 -n4")


class Draw:
    """A source of choices, and of names that no other part of the script has."""

    def __init__(self, seed: int) -> None:
        self.random = random.Random(seed)
        self.count = 0

    def of(self, *choices: str) -> str:
        return self.random.choice(choices)

    def chance(self, part: float) -> bool:
        return self.random.random() < part

    def name(self, stem: str) -> str:
        self.count += 1
        return f"{stem}{self.count}"


def drawn_script(seed: int) -> str:
    """Return a script. Its programs do not exist here, and its loops end."""
    draw = Draw(seed)
    lines = [draw.of("#!/bin/bash", "#!/bin/bash", "#!/bin/bash", "#!/bin/bash -l",
                     "#!/bin/sh", "#!/usr/bin/env bash", "#!/bin/bash -e")]
    posix = lines[0].endswith("sh") and "bash" not in lines[0]
    lines += [f"#SBATCH {draw.of(*SIZES)}"] if draw.chance(0.9) else []
    lines += [f"#SBATCH {line}" for line in draw.random.sample(DIRECTIVES, draw.random.randint(0, 3))]
    lines += ["", "# what follows is drawn"] if draw.chance(0.5) else [""]
    if draw.chance(0.08):  # what becomes [program]
        words = f"srun{draw.of('', ' -l', ' --ntasks=4')} python train.py --steps {draw.of('3', '4')} \"a b\" {draw.of('x', 'é')}"
        lines = [lines[0], "#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2", *lines[1:2] * draw.chance(0.2), words, ""]
        return "\n".join(lines)
    if draw.chance(0.35):
        modes = ("set -e", "set -u", "set -x", "set -eu") if posix else ("set -e", "set -euo pipefail", "set -x")
        lines.append(draw.of(*modes))
    if draw.chance(0.3):
        lines.append(draw.of("trap 'simulate bye' EXIT", "trap 'echo asked' USR1 TERM", "trap '' HUP"))
    if draw.chance(0.4):
        lines.append(draw.of("module load cuda/12 openmpi", "module purge && module load gcc", "conda activate env", "ml python"))
    if draw.chance(0.3):
        lines.append("module() { export PATH=$PWD/tools:$PATH LOADED=\"$*\"; }\nmodule load first")
    if draw.chance(0.5):
        lines.append("export MASTER_ADDR=$(scontrol show hostnames \"$SLURM_JOB_NODELIST\" | head -n 1) "
                     "MASTER_PORT=29500 RANK=0 UNSET=")
    lines += [statement(draw, 2, posix) for _ in range(draw.random.randint(2, 6))]
    lines += [draw.of("wait", "exit 0", "exit 7", "true", "echo done")] if draw.chance(0.4) else []
    return "\n".join([*lines, ""])


def program(draw: Draw) -> str:
    words = draw.random.sample(ARGUMENTS, draw.random.randint(0, 3))
    return " ".join([draw.of(*PROGRAMS), *words])


def launch(draw: Draw, posix: bool) -> str:
    """Return a command that runs a program, mostly on several ranks."""
    one, other = program(draw), program(draw)
    forms = [
        f"srun {one}", f"srun {one}", f"srun -n1 {one}", f"srun --nodes=1 --ntasks=2 {one}", f"srun -N1 -n1 --exclusive {one}",
        f"srun -l -u {one}", f"srun -n1 {one} : -n1 {other}", f"srun --ntasks=1 --exact --mem=100 {one}",
        f"srun --export=ALL,EXTRA=1,OTHER=\"b c\" -n1 {one}", f"srun --export=NONE -n1 --chdir=\"$PWD\" {one}",
        f"mkdir -p sub; srun --chdir=sub {one}", f"srun --cpus-per-task=1 --cpu-bind=none {one}",
        f"srun --ntasks-per-node=1 --kill-on-bad-exit=1 {one}", f"srun --output=task-%t.txt --error=task-%t.err {one}",
        f"srun --relative=0 -N1 -n1 {one}", f"srun --input=none {one}", f"srun --distribution=cyclic --label {one}",
        f"printf '0 simulate zero\\n1 main %%t of %%o\\n' >conf; srun -n2 --multi-prog conf {draw.of('', 'x')}",
        f"mpirun -np 2 {one}", f"mpirun -n 1 -x LR --bind-to none {one} : -n 1 {other}", f"mpiexec -n 2 {one}",
        f"mpirun --map-by ppr:1:node --mca btl tcp,self {one}",
        f"torchrun --nproc_per_node=2 --nnodes $SLURM_NNODES train.py {draw.of('', 'x')}",
        f"srun torchrun --nproc_per_node=2 --rdzv_endpoint=$MASTER_ADDR:29500 train.py {draw.of('', '--x')}",
        f"srun bash -c \"torchrun --node_rank=\\$SLURM_PROCID train.py {draw.of('a', 'b')}\"",
        "python -m torch.distributed.run --nproc_per_node=2 train.py", "accelerate launch --num_processes 2 train.py 'a b'",
        "accelerate env",
        "deepspeed --num_gpus 2 train.py", f"time srun -n1 {one}", f"timeout 60 srun -n1 {one}", f"env -u LR A=1 srun -n1 {one}",
        f"X=1 Y='a b' srun -n1 {one}", f"nohup srun -n1 {one} >nohup.txt 2>&1", f"command srun -n1 {one}", one, one, other]
    if not posix:
        forms += [f"srun -n1 {one} <<<\"$LR text\"", f"srun -n1 {one} < <(echo lines; echo more)", f"srun -n1 {one} |& cat"]
    return draw.of(*forms)


def statement(draw: Draw, depth: int, posix: bool = False) -> str:
    """Return a statement; with ``depth`` others may stand in it."""
    plain = [_plain, _plain, _plain, _input, _pipe, _variable, _parallel, _capture]
    forms: list[Callable[[Draw, int, bool], str]] = [*plain, _loop, _branch, _function, _subshell, _or] if depth else [*plain]
    return draw.random.choice(forms)(draw, depth - 1, posix)


def _plain(draw: Draw, depth: int, posix: bool) -> str:
    return launch(draw, posix)


def _input(draw: Draw, depth: int, posix: bool) -> str:
    mark = draw.of("EOF", "'EOF'", "-EOF")
    return draw.of(
        f"srun -n1 {program(draw)} <<{mark}\n$LR line\n  two `echo x`\nEOF", "python - <<'PY'\nimport torch\nprint('$LR')\nPY",
        "printf 'a\\nb\\n' >input.txt\nsrun --input=input.txt python train.py <input.txt", "simulate <\"$0\"",
        "cat >conf.json <<END\n{\"lr\": $LR, \"dir\": \"$PWD\"}\nEND\nsimulate conf.json <conf.json")


def _pipe(draw: Draw, depth: int, posix: bool) -> str:
    return draw.of(f"{launch(draw, posix)} | tee {draw.name('log')}.txt", f"echo lines | {launch(draw, posix)} | sort",
                   f"printf '1\\n2\\n' | while read -r line; do {program(draw)} \"$line\"; done",
                   f"seq 3 | xargs -n 1 simulate {draw.of('', '-x')}", f"{launch(draw, posix)} >{draw.name('out')}.txt 2>&1")


def _variable(draw: Draw, depth: int, posix: bool) -> str:
    forms = ["export RUN=$SLURM_JOB_NAME.$SLURM_NNODES", "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}",
             "LOCAL=not-exported; export LR=\"$LR 1\"", "unset LR", "cd sub 2>/dev/null || cd .", "umask 027; ulimit -c 0",
             "CMD='srun -n1 simulate \"a b\"'; eval \"$CMD\"", "CMD='srun -n1 simulate \"a b\"'; $CMD",
             "export PATH=$PWD/bin:$PATH", "exec 3>fd3.txt; simulate fd; exec 3>&-", "mkdir -p made/deep; touch made/file"]
    if not posix:
        forms += ["WORDS=(--a 'b c' \"$LR\"); simulate \"${WORDS[@]}\" ${#WORDS[@]}", "declare -x DECLARED=1; srun -n1 simulate",
                  "f() { simulate f; }; export -f f; srun -n1 bash -c f", "source <(echo export SOURCED=1); srun -n1 simulate"]
    return draw.of(*forms)


def _parallel(draw: Draw, depth: int, posix: bool) -> str:
    one, other = program(draw), program(draw)
    step = "srun -N1 -n1 -w $SLURMD_NODENAME --exact --mem=100"  # else which of two steps gets which node is a race
    return draw.of(f"{step} {one} &\n{step} {other} &\nwait",
                   f"srun -n1 --overlap {one} & P=$!\nwait $P; simulate ended $?", f"( {one}; {other} ) &\nwait",
                   f"for i in 1 2; do {step} {one} $i & done; wait")


def _capture(draw: Draw, depth: int, posix: bool) -> str:
    return draw.of(f"X=$({launch(draw, posix)})\nsimulate got \"$X\"", "X=$(srun -N1 -n1 hostname); simulate on $X",
                   "HOSTS=$(scontrol show hostnames | tr '\\n' ' '); simulate $HOSTS", "simulate \"$(nvidia-smi -L | wc -l)\"",
                   "srun sh -c 'test $SLURM_PROCID = 0'; simulate status $?", "sh -c 'exit 3'; simulate status $?")


def _loop(draw: Draw, depth: int, posix: bool) -> str:
    body, name = statement(draw, depth, posix), draw.name("i")
    return draw.of(f"for {name} in 1 'b c'; do\n{body}\nsimulate \"${name}\"\ndone",
                   f"{name}=0; while [ ${name} -lt 2 ]; do\n{name}=$(({name} + 1))\n{body}\ndone",
                   f"for {name} in 1 2 3; do\n[ ${name} = 2 ] && continue\n{body}\nbreak\ndone")


def _branch(draw: Draw, depth: int, posix: bool) -> str:
    one, other = statement(draw, depth, posix), statement(draw, depth, posix)
    return draw.of(f"if {launch(draw, posix)}; then\n{one}\nelse\n{other}\nfi", f"if [ -n \"$LR\" ]; then\n{one}\nfi",
                   f"case $SLURM_NNODES in\n1) {one}\n;;\n*) {other}\n;;\nesac", f"if ! srun -n1 false; then\n{one}\nfi")


def _function(draw: Draw, depth: int, posix: bool) -> str:
    name = draw.name("run_")
    body, end = statement(draw, depth, posix), draw.of("return 0", "return 3", "")
    return f"{name}() {{\n{body}\nsrun -n1 simulate \"$@\"\n{end}\n}}\n" \
           f"{name} 'a b' {draw.of('$LR', 'x')} {draw.of('', '|| simulate failed $?')}"


def _subshell(draw: Draw, depth: int, posix: bool) -> str:
    return draw.of(f"(\n{statement(draw, depth, posix)}\n)", f"(cd /; {program(draw)})", f"{{ {launch(draw, posix)}\n}} 2>&1")


def _or(draw: Draw, depth: int, posix: bool) -> str:
    return draw.of(f"{launch(draw, posix)} || simulate fallback", f"{launch(draw, posix)} && simulate then",
                   f"! {launch(draw, posix)}", f"{launch(draw, posix)} || exit 5")
