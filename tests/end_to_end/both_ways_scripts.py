"""Job scripts that a seed draws from a grammar: directives, launches of ranks, and all that bash can put around them.

In a text of the grammar ``«launch»`` stands for one of the texts with that name, ``«a|b»`` for a or b, and ``§`` for a number
that no other text of the script has.
"""

from __future__ import annotations

import random
import re
from itertools import count

ARGUMENTS = (
    "--lr $LR", '--lr "$LR"', "'$HOME'", '"a b"', "''", "é", "*.txt", "{a,b}/x", "$((1 + 2))", "${UNSET:-default value}",
    '"${UNSET-}"', "$SLURM_NTASKS", "$SLURM_JOB_NUM_NODES", '"$TRICKY"', "$TRICKY", "--name=$SLURM_JOB_NAME",
    '"$(basename "$PWD")"', "`echo sub`", "-n 3", "--nodes", "\\$X", '"\\"q\\""', "${LR%e-4}", "$# $0x", '"$@"', "$RANK", "~/x",
    "a\\ b", "$'tab\\there'", "%j", "-- x")
DIRECTIVES = (
    "--job-name=drawn", "--job-name=\"two words\"", "--cpus-per-task=2", "--mem=2G", "--mem-per-cpu=100", "--exclusive",
    "--gres=gpu:2", "--gpus-per-node=1", "--time=10", "--time=0-01:00:00", "--signal=B:USR1@60", "--output=out-%j.txt",
    "--comment=\"a b\"", "--open-mode=append", "--no-requeue", "--requeue", "--export=ALL", "--mail-type=END", "-J short",
    "--distribution=cyclic", "-c 2", "--ntasks-per-node=2", "--hint=nomultithread", "--oversubscribe",
    "--kill-on-invalid-dep=yes", "--cpus-per-task 3  # a comment")
STEP = "srun -N1 -n1 -w $SLURMD_NODENAME --exact --mem=100"  # else which of two steps gets which node is a race
GRAMMAR = {
    "shebang": (*["#!/bin/bash"] * 3, "#!/bin/bash -l", "#!/bin/sh", "#!/usr/bin/env bash", "#!/bin/bash -e"),
    "size": ("--nodes=2\n#SBATCH --ntasks-per-node=2", "--nodes=2", "-N 1\n#SBATCH -n 3", "--ntasks=2", "-n 3",
             "--nodes=2\n#SBATCH --ntasks=3", "--nodes=2-2", "--nodes=2 --ntasks-per-node=1", "-N2 -n4"),
    "mode": ("set -e", "set -x"),
    "trap": ("trap 'simulate bye' EXIT", "trap 'echo asked' USR1 TERM", "trap '' HUP"),
    "module": ("module load cuda/12 openmpi", "module purge && module load gcc", "conda activate env", "ml python"),
    "end": ("wait", "exit 0", "exit 7", "true", "echo done"),
    "name": ("train.sh", "python train.py", "python -u -m package.train", "./main", "simulate",
             "bash -c 'main of $SLURM_PROCID \"$0\"' zero", "sh -c 'main \"$0\"'"),
    "launch": (
        "srun «program»", "srun «program»", "srun -n1 «program»", "srun --nodes=1 --ntasks=2 «program»",
        "srun -N1 -n1 --exclusive «program»", "srun -l -u «program»", "srun -n1 «program» : -n1 «program»",
        "srun --ntasks=1 --exact --mem=100 «program»", "srun --export=ALL,EXTRA=1,OTHER=\"b c\" -n1 «program»",
        "srun --export=NONE -n1 --chdir=\"$PWD\" «program»", "mkdir -p sub; srun --chdir=sub «program»",
        "srun --cpus-per-task=1 --cpu-bind=none «program»", "srun --ntasks-per-node=1 --kill-on-bad-exit=1 «program»",
        "srun --output=task-%t.txt --error=task-%t.err «program»", "srun --relative=0 -N1 -n1 «program»",
        "srun --input=none «program»", "srun --distribution=cyclic --label «program»",
        "printf '0 /usr/bin/env simulate zero\\n1 /usr/bin/env main %%t of %%o\\n' >conf; srun -n2 --multi-prog conf «|x»",
        "mpirun -np 2 «program»",
        "mpirun -n 1 -x LR --bind-to none «program» : -n 1 «program»", "mpiexec -n 2 «program»",
        "mpirun --map-by ppr:1:node --mca btl tcp,self «program»",
        "torchrun --nproc_per_node=2 --nnodes $SLURM_NNODES train.py «|x»",
        "srun torchrun --nproc_per_node=2 --rdzv_endpoint=$MASTER_ADDR:29500 train.py «|--x»",
        "srun bash -c \"torchrun --node_rank=\\$SLURM_PROCID train.py «a|b»\"",
        "python -m torch.distributed.run --nproc_per_node=2 train.py", "accelerate launch --num_processes 2 train.py 'a b'",
        "accelerate env", "deepspeed --num_gpus 2 train.py", "time srun -n1 «program»", "timeout 60 srun -n1 «program»",
        "env -u LR A=1 srun -n1 «program»", "X=1 Y='a b' srun -n1 «program»", "nohup srun -n1 «program» >nohup.txt 2>&1",
        "command srun -n1 «program»", "«program»", "«program»", "«program»"),
    "simple": ("«launch»", "«launch»", "«launch»", "«input»", "«pipe»", "«variable»", "«parallel»", "«capture»"),
    "compound": ("«loop»", "«branch»", "«function»", "«subshell»", "«or»"),
    "input": (
        "srun -n1 «program» <<«EOF|'EOF'|-EOF»\n$LR line\n  two `echo x`\nEOF", "python - <<'PY'\nimport torch\nprint('$LR')\nPY",
        "printf 'a\\nb\\n' >input.txt\nsrun --input=input.txt python train.py <input.txt", "simulate <\"$0\"",
        "cat >conf.json <<END\n{\"lr\": $LR, \"dir\": \"$PWD\"}\nEND\nsimulate conf.json <conf.json"),
    "pipe": ("«launch» | tee log§.txt", "echo lines | «launch» | sort", "seq 3 | xargs -n 1 simulate «|-x»",
             "«launch» >out§.txt 2>&1", "printf '1\\n2\\n' | while read -r line; do «program» \"$line\"; done"),
    "variable": (
        "export RUN=$SLURM_JOB_NAME.$SLURM_NNODES", "export OMP_NUM_THREADS=${SLURM_CPUS_PER_TASK:-1}", "unset LR",
        "LOCAL=not-exported; export LR=\"$LR 1\"", "cd sub 2>/dev/null || cd .", "umask 027; ulimit -c 0",
        "CMD='srun -n1 simulate \"a b\"'; eval \"$CMD\"", "CMD='srun -n1 simulate \"a b\"'; $CMD", "export PATH=$PWD/bin:$PATH",
        "exec 3>fd3.txt; simulate fd; exec 3>&-", "mkdir -p made/deep; touch made/file"),
    "parallel": (f"{STEP} «program» &\n{STEP} «program» &\nwait",
                 "srun -n1 --overlap «program» & P=$!\nwait $P; simulate ended $?", "( «program»; «program» ) &\nwait",
                 f"for i in 1 2; do {STEP} «program» $i & done; wait"),
    "capture": ("X=$(«srun|srun -n1|mpirun -np 2|command srun» «program» | sort)\nsimulate got \"$X\"",
                "X=$(srun -N1 -n1 hostname); simulate on $X",
                "HOSTS=$(scontrol show hostnames | tr '\\n' ' '); simulate $HOSTS", "simulate \"$(nvidia-smi -L | wc -l)\"",
                "srun sh -c 'test $SLURM_PROCID = 0'; simulate status $?", "sh -c 'exit 3'; simulate status $?"),
    "loop": ("for i§ in 1 'b c'; do\n«statement»\nsimulate \"$i§\"\ndone",
             "i§=0; while [ $i§ -lt 2 ]; do\ni§=$((i§ + 1))\n«statement»\ndone",
             "for i§ in 1 2 3; do\n[ $i§ = 2 ] && continue\n«statement»\nbreak\ndone"),
    "branch": ("if «launch»; then\n«statement»\nelse\n«statement»\nfi", "if [ -n \"$LR\" ]; then\n«statement»\nfi",
               "case $SLURM_NNODES in\n1) «statement»\n;;\n*) «statement»\n;;\nesac",
               "if ! srun -n1 false; then\n«statement»\nfi"),
    "function": ("run_§() {\n«statement»\nsrun -n1 simulate \"$@\"\n«return 0|return 3|»\n}\n"
                 "run_§ 'a b' «$LR|x» «or failed»",),
    "or failed": ("", "|| simulate failed $?"),
    "subshell": ("(\n«statement»\n)", "(cd /; «program»)", "{ «launch»\n} 2>&1"),
    "or": ("«launch» || simulate fallback", "«launch» && simulate then", "! «launch»", "«launch» || exit 5"),
}
# What sh does not have, or has otherwise.
OF_BASH = {
    "mode": ("set -euo pipefail",),
    "launch": (
        "srun -n1 «program» <<<\"$LR text\"", "srun -n1 «program» < <(echo lines; echo more)", "srun -n1 «program» |& cat"),
    "variable": (
        "WORDS=(--a 'b c' \"$LR\"); simulate \"${WORDS[@]}\" ${#WORDS[@]}", "declare -x DECLARED=1; srun -n1 simulate",
        "f() { simulate f; }; export -f f; srun -n1 bash -c f", "source <(echo export SOURCED=1); srun -n1 simulate"),
}
OF_SH = {"mode": ("set -u", "set -eu")}
ADDRESS = 'export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1) MASTER_PORT=29500 RANK=0 UNSET='
# Parts of a script in their order, and how many of a hundred scripts have each.
PARTS = (
    (50, "# what follows is drawn"), (35, "«mode»"), (30, "«trap»"), (40, "«module»"),
    (30, "module() { export PATH=$PWD/tools:$PATH LOADED=\"$*\"; }\nmodule load first"), (50, ADDRESS), (100, "«statement»"),
    (100, "«statement»"), (80, "«statement»"), (60, "«statement»"), (40, "«statement»"), (20, "«statement»"), (40, "«end»"))
ONE_LAUNCH = "srun«| -l| --ntasks=4» python train.py --steps «3|4» \"a b\" «x|é»"  # it becomes [program]


def drawn_script(seed: int) -> str:
    """Return a script. Its programs do not exist here, and its loops end."""
    draw, numbers = random.Random(seed), count(1)
    shebang = draw.choice(GRAMMAR["shebang"])
    dialect = OF_SH if shebang == "#!/bin/sh" else OF_BASH

    def filled(text: str, depth: int = 2) -> str:
        """Fill in a text. With ``depth`` a statement may hold others."""
        def part(name: str) -> str:
            if name == "program":
                return " ".join([filled("«name»"), *draw.sample(ARGUMENTS, draw.randint(0, 3))])
            if name == "statement":
                return filled(draw.choice(GRAMMAR["simple"] + GRAMMAR["compound"] * (depth > 0)), depth - 1)
            return filled(draw.choice(GRAMMAR[name] + dialect.get(name, ()) if name in GRAMMAR else name.split("|")), depth)

        return re.sub("«(.*?)»", lambda match: part(match[1]), text.replace("§", str(next(numbers))))

    size = ["#SBATCH «size»"] * (draw.random() < 0.9)
    directives = [f"#SBATCH {line}" for line in draw.sample(DIRECTIVES, draw.randint(0, 3))]
    if draw.random() < 0.08:
        size, directives = ["#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2"], directives[:draw.random() < 0.2]
        body = [ONE_LAUNCH]
    else:
        body = [text for chance, text in PARTS if draw.random() < chance / 100]
    return "\n".join([shebang, *map(filled, (*size, *directives, "", *body)), ""])
