"""How long training waits for a checkpoint: written at once, and in the background. Two runs of a job on emulated nodes.

    python benchmarks/checkpoint_stall.py [--hidden 1024] [--layers 12] [--steps 48] [--every 12] [--directory DIRECTORY]

The first checkpoint of each run is left out. The state of the same step is compared byte by byte. Between two checkpoints there
must be time enough to write one, or training waits for that.
"""

import re
import statistics
import subprocess
import sys
from pathlib import Path
from tempfile import TemporaryDirectory

import click

JOB = """[job]
name = "stall"
[model]
config = {{ model_type = "gpt2", n_embd = {hidden}, n_layer = {layers}, n_head = 8, n_positions = 64, vocab_size = 1024 }}
[data]
files = ["text.txt"]
sequence_length = 32
[train]
steps = {steps}
global_batch = 2
precision = "fp32"
[checkpoint]
every = {every}
keep = 99
background = {background}
"""
SAVED = re.compile(r"checkpoint (\S+) saved in ([\d.]+) s(?:; training waited for ([\d.]+) s)?")


def saves(folder: Path, background: bool, **sizes: int) -> dict[str, tuple[float, float]]:
    """Return seconds of each checkpoint but the last: until it was complete, and for which training waited."""
    folder.mkdir()
    (folder / "text.txt").write_text(Path(re.__file__).read_text() * 4)
    (folder / "job.toml").write_text(JOB.format(background=str(background).lower(), **sizes))
    command = [sys.executable, "-m", "hpc_mp", "launch", str(folder / "job.toml"), "--on", "local"]
    subprocess.run(command, cwd=folder, check=True, stdout=subprocess.DEVNULL)
    log = (folder / "runs" / "stall" / "0001" / "log" / "main.log").read_text()
    return {name: (float(whole), float(waited or whole)) for name, whole, waited in SAVED.findall(log)[:-1]}


@click.command()
@click.option("--hidden", default=1024)
@click.option("--layers", default=12)
@click.option("--steps", default=48)
@click.option("--every", default=12)
@click.option("--directory", type=click.Path(path_type=Path, file_okay=False, exists=True), help="where the runs are")
def main(directory: Path | None, **sizes: int) -> None:
    with TemporaryDirectory(dir=directory) as folder:
        runs = {background: saves(Path(folder) / str(background), background, **sizes) for background in (False, True)}
        names = list(runs[False])
        first, other = (Path(folder) / str(background) / "runs/stall/0001/checkpoints" for background in (False, True))
        files = [path.relative_to(first) for name in names for path in (first / name).iterdir()]
        same = all((first / file).read_bytes() == (other / file).read_bytes() for file in files)
        size = sum(path.stat().st_size for path in (first / names[0]).iterdir())
    at_once, behind = (statistics.median(waited for _, waited in list(run.values())[1:]) for run in runs.values())
    print(f"{size / 1e9:.2f} GB; at once {at_once:.2f} s, in the background {behind:.2f} s: {behind / at_once:.1%}; "
          f"{'the same files' if same else 'the files DIFFER'} in {len(names)} checkpoints")


if __name__ == "__main__":
    main()
