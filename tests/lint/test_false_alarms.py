"""Alarms that public job scripts set off without a fault, and the true alarms beside them that still come."""

from __future__ import annotations

from pathlib import Path

import pytest
from lint_cases import placed

from hpc_mp.lint.kinds import kind_of
from hpc_mp.lint.sbatch import lint

RELEASES: dict[str, tuple[int, int]] = {"22.05": (22, 5), "24.11": (24, 11), "25.05": (25, 5)}


def codes(text: str, where: Path, release: str | None = None) -> set[str]:
    return {finding.code for finding in lint(placed(text)[0], directory=where, version=RELEASES.get(release or ""))}


def submitter(body: str) -> str:
    return f"#!/bin/bash\n{body}\nEOF\nsbatch job.sh\n"


ON_CPUS = "#!/bin/bash\n#SBATCH --time=01:00:00 --mem=0\n"
IF_SLURM = 'if [[ -n "${SLURM_SUBMIT_DIR}" && -d x ]]; then\n  D=$SLURM_SUBMIT_DIR\n'
OWN = '  D=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)\n'
FALSE_ALARMS = (  # rule, scripts in which it finds nothing
    ("HM120", "shopt -s extglob\nrm -f !(*.pdb|*.txt)\n"),
    ("HM120", "shopt -s nullglob extglob\ncp +(a|b).txt c\nfor f in !(*.a); do echo $f; done\n"),
    ("HM120", "  shopt -s globstar; shopt -s extglob\ncase $X in +([0-9])) echo;; esac\nls @(a|b)\n"),
    *((code, submitter(body)) for code in ("HM201", "HM206", "HM311", "HM506") for body in (
        "module load x\ncat > job.sh <<EOF\n#!/bin/bash\n#SBATCH -N 2",
        "module load x\ncat > job.sh <<-'EOF'\n\t#SBATCH -N 2",
        'module load x\necho "#!/bin/bash\n#SBATCH -N 2" > job.sh\ncat <<EOF')),
    ("HM505", submitter('cd "$(dirname "$0")"\ncat > job.sh <<EOF\n#SBATCH -N 2')),
    ("HM314", "ibrun -n 1 apptainer exec --nv $IMAGE ldd ./solver | grep not\n"),
    ("HM314", "mpirun -np 1 ldd ./solver | grep not\n"),
    ("HM314", "srun -l bash -c 'hostname' | sort -u > hosts\n"),
    ("HM314", "srun -l /bin/hostname | sort -n | awk '{print $2}' > hosts\n"),
    ("HM503", ON_CPUS + "ulimit -s unlimited\nsrun ./gchp\n"),
    ("HM503", ON_CPUS + "ulimit -Ss unlimited\nmpirun ./mesonh\n"),
    ("HM503", ON_CPUS + "ulimit -s unlimited\npython plot.py\n"),
    ("HM407", "MASTER_ADDR=$(ip -4 -o addr | egrep -v 'enp|127.0.0.1|docker' | tail -n1)\n"),
    ("HM407", 'MASTER_ADDR=$(getent hosts $X | grep -v "localhost" | head -n1)\n'),
    ("HM407", "MASTER_ADDR=$(ip addr | awk '!/127.0.0.1/ {print $4}')\n"),
    ("HM505", f"{IF_SLURM}else\n{OWN}fi\n"),
    ("HM505", f'if [ -n "$SLURM_JOB_ID" ]; then\n  D=$PWD\nelse\n  echo by hand\n{OWN}fi\n'),
    ("HM505", f'if [ -z "$SLURM_JOBID" ]; then\n{OWN}else\n  D=$SLURM_SUBMIT_DIR\nfi\n'),
    ("HM208", ON_CPUS + "#SBATCH --nodes=4 --ntasks=4 --gpus-per-task=1\nsrun python a.py\n"),
    ("HM208", ON_CPUS + "#SBATCH --nodes=2 --ntasks-per-node=1 --gpus-per-task=1\nsrun python a.py\n"),
    ("HM208", "srun --nodes=2 --ntasks=2 --gpus-per-task=1 python a.py\n"),
    ("HM116", 'C="if [ ! -d a ]; then mkdir a; fi"\nsh -c "${C}"\n'),
    ("HM116", 'C="for i in 1 2; do echo $i; done"\nsrun bash -c "$C"\n'),
    ("HM116", 'C="while true; do date; done"\nbash -c "$C"\n'),
)
TRUE_ALARMS = (
    ("HM120", "# shopt -s extglob\nrm -f !(*.pdb|*.txt)\n"),
    ("HM120", "shopt -s nullglob\nrm -f !(*.pdb|*.txt)\n"),
    ("HM120", "shopt -s extglob\nif true; then\n  rm -f !(*.pdb)\n"),
    ("HM201", "#!/bin/bash\n#SBATCH -N 2\ncat > job.sh <<EOF\n#SBATCH -t 1\nEOF\nsbatch job.sh\n"),
    ("HM206", "#!/bin/bash\nhostname\n#SBATCH -N 2\n"),
    ("HM311", "cat > job.sh <<EOF\n#SBATCH -t 1\nEOF\nsbatch job.sh\n"),
    ("HM314", "ibrun -n 8 ./solver | grep step\n"),
    ("HM314", "srun -K bash -c 'hostname; exec python a.py' | tee run.log\n"),
    ("HM503", ON_CPUS + "#SBATCH --gres=gpu:4\nulimit -s unlimited\nsrun ./solver\n"),
    ("HM503", ON_CPUS + "ulimit -s unlimited\nsrun torchrun a.py\n"),
    ("HM407", 'MASTER_ADDR="${HEAD:-"127.0.0.1"}"\n'),
    ("HM407", "MASTER_ADDR=$(getent hosts $X || echo localhost)\n"),
    ("HM407", "MASTER_ADDR=${HEAD-${OTHER:-localhost}}\n"),
    ("HM505", f"{IF_SLURM}{OWN}else\n  D=$PWD\nfi\n"),
    ("HM505", f"{IF_SLURM}fi\n{OWN}"),
    ("HM505", f"if [ -n $SLURM_ARRAY_TASK_ID ]; then\n  D=.\nelse\n{OWN}fi\n"),
    ("HM208", ON_CPUS + "#SBATCH --nodes=2 --ntasks=4 --gpus-per-task=1\nsrun python a.py\n"),
    ("HM208", ON_CPUS + "#SBATCH --ntasks=4 --gpus-per-task=1\nsrun python a.py\n"),
    ("HM208", "srun --nodes=2 --ntasks=$N --gpus-per-task=1 python a.py\n"),
    ("HM301", 'C="module load x; python a.py"\nsrun bash -c "$C"\n'),
)


@pytest.mark.parametrize(("code", "text"), FALSE_ALARMS)
def test_no_false_alarm_comes(code: str, text: str, tmp_path: Path) -> None:
    assert code not in codes(text, tmp_path)


@pytest.mark.parametrize(("code", "text"), TRUE_ALARMS)
def test_the_true_alarm_still_comes(code: str, text: str, tmp_path: Path) -> None:
    assert code in codes(text, tmp_path)


@pytest.mark.parametrize(("release", "finds"), [("22.05", False), ("24.11", False), ("25.05", True), (None, True)])
def test_several_mail_types_are_merged_before_25_05(release: str | None, finds: bool, tmp_path: Path) -> None:
    """sbatch 22.05.8 -vvv: "mail-type : BEGIN,END"."""
    for more in ("#SBATCH --mail-type=end\n", "#SBATCH -J x --mail-type end\n"):
        assert ("HM110" in codes("#SBATCH --mail-type=begin\n" + more, tmp_path, release)) is finds
    assert "HM110" in codes("#SBATCH --qos=a\n#SBATCH --qos=b\n", tmp_path, release)


SCRIPT = "#!/bin/bash\n#SBATCH -N 2\n"


@pytest.mark.parametrize(("text", "kind"), [
    (SCRIPT + 'T=${T:-"{{ instruction }}"}\n', "sbatch"),
    (SCRIPT + "docker inspect -f '{{range .X}}{{.Y}}{{end}}' a\n", "sbatch"),
    (SCRIPT + 'python -c "print(f\'{{i}} of 3\')"\n', "sbatch"), (SCRIPT + "srun python {{ program }}\n", "jinja"),
    (SCRIPT + 'A="{{ a }}"\nmodel={{model}}\n', "jinja"), ('#!/bin/bash\n#SBATCH --job-name="{{ name }}"\n', "jinja"),
    (SCRIPT + "{% if gpu %}\nnvidia-smi\n{% endif %}\n", "jinja"), ('[job]\nname = "{{ name }}"\n', "jinja")])
def test_braces_between_quotes_are_no_placeholder_of_a_script(text: str, kind: str) -> None:
    assert kind_of(Path("a.toml" if text.startswith("[") else "a.sh"), text) == kind
