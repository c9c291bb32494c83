"""The test folders that a change to one room can break: its own, and those of the rooms that import it.

``python tests/support/neighbours.py ROOM`` prints them; ``make test ROOM=launch`` runs them.
"""

import sys
from pathlib import Path

import grimp

ROOT = Path(__file__).resolve().parents[2]


def importers(room: str, graph: grimp.ImportGraph) -> set[str]:
    """Return the rooms with a module that imports one of ``room``, and ``room`` itself."""
    inside = {f"hpc_mp.{room}", *graph.find_descendants(f"hpc_mp.{room}")}
    found = {importer for module in inside for importer in graph.find_modules_that_directly_import(module)}
    return {room, *(name.split(".")[1] for name in found)}


def neighbours(room: str) -> list[str]:
    """Return the test folders, relative to the checkout.

    Raises:
        SystemExit: the room does not exist; the message lists those that do.
    """
    rooms = sorted(path.parent.name for path in ROOT.glob("hpc_mp/*/__init__.py"))
    if room not in rooms:
        sys.exit(f"ROOM={room}: is no room. Choose one of {', '.join(rooms)}.")
    found = importers(room, grimp.build_graph("hpc_mp"))
    folders = sorted(f"tests/{name}" for name in found if (ROOT / "tests" / name).is_dir())
    return folders or sys.exit(f"ROOM={room}: its tests lie with the rooms that it calls. Run make test.")


if __name__ == "__main__":
    print(*neighbours(sys.argv[1]))
