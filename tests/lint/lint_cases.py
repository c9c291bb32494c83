"""The planted faults of the linter's rules: those of ``tests/golden/lint/planted.toml``, and those of the youngest rules."""

from __future__ import annotations

import tomllib
from pathlib import Path
from typing import Any

GOLDEN = Path(__file__).parents[1] / "golden"
_PLANTED = tomllib.loads((GOLDEN / "lint" / "planted.toml").read_text(encoding="utf-8"))
HEAD: str = _PLANTED["head"]
CASES: list[dict[str, Any]] = [
    *_PLANTED["case"],
    {"code": "HM121", "line": 1, "bad": "#SBATCH --mail-type=BEGIN,ABORT\n", "good": "#SBATCH --mail-type=BEGIN,FAIL\n"},
    {"code": "HM121", "line": 1, "bad": "#SBATCH --mail-type=timeout\n", "good": "#SBATCH --mail-type=time_limit_90,\n"},
    {"code": "HM122", "line": 1, "bad": "#PBS -l nodes=2\n", "good": "##PBS -l nodes=2\n"},
    {"code": "HM122", "line": 2, "bad": "hostname\n#BSUB -P x\n#BSUB -q y\n",
     "good": "#SBATCH --ignore-pbs\nhostname\n#BSUB -P x\n"},
    {"code": "HM508", "line": 1, "bad": "mpirun \\  \n  -np 8 ./solver\n", "good": "mpirun \\\n  -np 8 ./solver\n"},
    {"code": "HM508", "line": 2, "bad": "srun -K python a.py \\\n  --steps 3 \\\t\n  --warmup\n",
     "good": "cat > note <<EOF\n--steps 3 \\ \nEOF\nsrun -K python a.py 'x \\ \n' # \\ \n"},
]


def placed(text: str) -> tuple[str, int]:
    """Return the whole script, and the number of lines above the text of a case."""
    whole = text.lstrip("\n").startswith("#!") or "\r" in text
    return (text, 0) if whole else (HEAD + text, HEAD.count("\n"))
