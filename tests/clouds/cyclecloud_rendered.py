"""Rendered clusters of some sizes for the tests, and the files that record them: run as a program, this writes
those of tests/golden/cyclecloud/render and of cyclecloud/parameters anew; read the difference."""

import json
import re
import shlex
from pathlib import Path
from typing import Any

from click.testing import CliRunner

from hpc_mp.catalogue import MachineType
from hpc_mp.cli.cloud import command
from hpc_mp.clouds.azure.offer import load_offer
from hpc_mp.clouds.azure.render.options import Choices, parameters, settle
from hpc_mp.clouds.azure.render.summary import AzureSummary, azure_summary

ROOT = Path(__file__).resolve().parents[2]
FOLDER = ROOT / "cyclecloud"
TEMPLATE = FOLDER / "templates" / "hpc-mp-slurm.txt"
GOLDEN = Path(__file__).parents[1] / "golden" / "cyclecloud"
OFFER = load_offer()
RECORDED = (  # as golden files: GPUs and InfiniBand, none of it, AMD, arm64 in racks, constrained cores, a twin, threads
    "Standard_ND96isr_H100_v5", "Standard_ND96isr_MI300X_v5", "Standard_ND128isr_GB300_v6", "Standard_HB120-16rs_v3",
    "Standard_ND96is_H200_v5", "Standard_D8ads_v5")
H100 = Choices("Standard_ND96isr_H100_v5", 4, region="westeurope", subnet="group/net/subnet", credentials="azure",
               accounting=False)
READY = re.compile(r"`(parameters/[\w-]+\.json)` \| `hpc-mp cloud (render [^`]+)`")


def choices_of(size: MachineType) -> Choices:
    """Choose two nodes; one of a size without InfiniBand that has a twin with it."""
    return Choices(size.name, 1 if size.twin else 2, region="westeurope", subnet="group/net/subnet", credentials="azure")


def values_of(choices: Choices) -> dict[str, Any]:
    return parameters(settle(choices, OFFER))


def summary_of(choices: Choices) -> AzureSummary:
    return azure_summary(settle(choices, OFFER), OFFER)


def record_of(size: MachineType) -> str:
    """Return the content of a golden file: the file of parameters and the summary."""
    choices = choices_of(size)
    return f"{json.dumps(values_of(choices), indent=2)}\n\n" + "\n".join(summary_of(choices).words()) + "\n"


def ready() -> dict[Path, list[str]]:
    """Return the ready files of parameters with the command that writes each, from cyclecloud/README.md."""
    rows = READY.findall((FOLDER / "README.md").read_text(encoding="utf-8"))
    return {FOLDER / name: shlex.split(line) for name, line in rows}


def rendered_by(arguments: list[str], directory: Path) -> str:
    """Return the file of parameters that a command of the document writes."""
    done = CliRunner().invoke(command, [*arguments, "--output", str(directory)], catch_exceptions=False)
    assert done.exit_code == 0, done.output
    return (directory / "parameters.json").read_text(encoding="utf-8")


if __name__ == "__main__":
    import tempfile

    for name in RECORDED:
        (GOLDEN / "render" / f"{name}.txt").write_text(record_of(OFFER.sizes[name.casefold()]), encoding="utf-8")
    for file, arguments in ready().items():
        with tempfile.TemporaryDirectory() as folder:
            file.write_text(rendered_by(arguments, Path(folder) / "out"), encoding="utf-8")
