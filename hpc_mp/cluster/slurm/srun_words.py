"""The arguments of srun: the places of its programs, and options with which no wrapper may precede a program."""

from collections.abc import Sequence

from hpc_mp.cluster.slurm.option_syntax import PlainWord, parse, syntax

# Programs in a file, an executable that is copied, a terminal, an image that lacks what the host has; no tasks at all.
ALONE = frozenset({"multi-prog", "bcast", "pty", "test-only", "help", "usage", "version", "no-allocate"})


def programs_of_srun(words: Sequence[str]) -> tuple[int, ...] | None:
    """Return where the programs begin among srun's arguments: one index per component (``srun -n1 ./a : -n3 ./b``).

    None if srun starts no program, or a program that no wrapper may precede, or if an option is unknown and may have a value.
    """
    places, begin = [], 0
    while begin < len(words):
        end = next((at for at in range(begin, len(words)) if words[at] == ":"), len(words))
        options, program = parse([PlainWord(word) for word in words[begin:end]], syntax("srun"), permute=False)
        if not program or any(
                not option.is_known or option.name in ALONE or option.name.startswith("container") for option in options):
            return None
        places.append(end - len(program))
        begin = end + 1
    return tuple(places) or None
