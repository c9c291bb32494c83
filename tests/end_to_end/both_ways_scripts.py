"""Job scripts that a seed draws from a grammar: directives, launches of ranks, and all that bash can put around them.

In a text of the grammar ``«launch»`` stands for one of the texts with that name, ``«a|b»`` for a or b, and ``§`` for a number
that no other text of the script has.
"""

import random
import re
from itertools import count

from tables import table

ARGUMENTS: list[str] = table(__file__, "both_ways_scripts.toml", "arguments")
DIRECTIVES = table(__file__, "both_ways_scripts.toml", "directives")
GRAMMAR: dict[str, list[str]] = table(__file__, "both_ways_scripts.toml", "grammar")
# What sh does not have, or has otherwise.
OF_BASH = table(__file__, "both_ways_scripts.toml", "of_bash")
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
            return filled(draw.choice([*GRAMMAR[name], *dialect.get(name, ())] if name in GRAMMAR else name.split("|")), depth)

        return re.sub("«(.*?)»", lambda match: part(match[1]), text.replace("§", str(next(numbers))))

    size = ["#SBATCH «size»"] * (draw.random() < 0.9)
    directives = [f"#SBATCH {line}" for line in draw.sample(DIRECTIVES, draw.randint(0, 3))]
    if draw.random() < 0.08:
        size, directives = ["#SBATCH --nodes=2", "#SBATCH --ntasks-per-node=2"], directives[:draw.random() < 0.2]
        body = [ONE_LAUNCH]
    else:
        body = [text for chance, text in PARTS if draw.random() < chance / 100]
    return "\n".join([shebang, *map(filled, (*size, *directives, "", *body)), ""])
