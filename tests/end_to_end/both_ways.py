"""Job scripts run both ways on one lab, by sbatch and adopted, with stand-ins for all of their programs: is all the same?

    .venv/bin/python tests/end_to_end/both_ways.py DIRECTORY --json OUT     # all files below DIRECTORY
    .venv/bin/python tests/end_to_end/both_ways.py --drawn 500 --json OUT   # scripts that a seed draws

Started again with the same OUT, it goes on with the scripts that OUT lacks. Several scripts run at a time, each on two hosts of
its own. `both_ways_sandbox.py` says what is changed in the directives before both runs, `both_ways_compare.py` what is not
compared.
"""

import argparse
import json
import re
import sys
import time
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from both_ways_run import Case, lab_for, run_all
from both_ways_scripts import drawn_script


def cases_of(directory: Path) -> Iterator[Case]:
    """Yield the scripts below a directory, alternately of all its projects; every second one has programs that may fail."""
    projects: dict[str, list[Path]] = {}
    for path in sorted(directory.rglob("*")):
        with suppress(OSError):
            if path.is_file() and b"\0" not in (head := path.read_bytes()[:1 << 16]) and b"#SBATCH" in head:
                projects.setdefault(path.relative_to(directory).parts[0], []).append(path)
    for _, path in sorted(entry for paths in projects.values() for entry in enumerate(paths)):
        number = zlib.crc32(path.name.encode())
        text = path.read_bytes().decode(errors="surrogateescape")
        yield Case(str(path.relative_to(directory)), path.name, text, number if number % 2 else 0)


def drawn_cases(count: int, seed: int) -> Iterator[Case]:
    for number in range(seed, seed + count):
        yield Case(f"drawn-{number}", "job one.sbatch", drawn_script(number), number if number % 2 else 0)


def summary(results: Sequence[Mapping[str, Any]]) -> str:
    """Return counts of the states, of the projects, and of the kinds of differences."""
    states = Counter(result["state"] for result in results)
    projects = {result["script"].split("/")[0] for result in results if "/" in result["script"]}
    kinds = Counter(kind for result in results if result["state"] == "differs" for kind in {
        re.sub(r" of .*|\(.*", "", line.split(":")[0]) for line in result["differences"]})
    return "\n".join([f"{len(results)} scripts of {len(projects)} projects: {dict(states)}",
                      *(f"  {count:4} {kind}" for kind, count in kinds.most_common(40))])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("directory", nargs="?", type=Path)
    parser.add_argument("--drawn", type=int, default=0, help="that many drawn scripts too")
    parser.add_argument("--seed", type=int, default=1, help="of the first drawn script")
    parser.add_argument("--json", type=Path, required=True, help="results, one JSON document a line")
    parser.add_argument("--cells", type=int, default=4, help="scripts at a time")
    parser.add_argument("--limit", type=float, default=300, help="seconds for each run of a script")
    parser.add_argument("--minutes", type=float, default=1e6, help="begin no script after them")
    parser.add_argument("--only", default="", help="scripts whose name contains this")
    options = parser.parse_args()
    results = [json.loads(line) for line in options.json.read_text().splitlines()] if options.json.exists() else []
    past = {result["script"] for result in results}
    cases = chain(drawn_cases(options.drawn, options.seed), cases_of(options.directory) if options.directory else ())
    due = (case for case in cases if case.name not in past and options.only in case.name)
    with lab_for(options.cells) as lab, options.json.open("a") as file:
        for result in run_all(lab, due, options.cells, options.limit, time.time() + 60 * options.minutes):
            results.append(result)
            print(result["state"], result["script"], *result.get("differences", [])[:3], sep="\n    ", flush=True)
            print(json.dumps(result), file=file, flush=True)
    print(summary(results))
    return 0 if all(result["state"] in ("equal", "named", "refused", "varies", "too long") for result in results) else 1


if __name__ == "__main__":
    sys.exit(main())
