"""Host lists against Slurm itself: what ``scontrol show hostnames`` and ``show hostlist`` print for generated expressions.

``make test`` asks for a few hundred, ``make prove`` for 10,000. Forms in which versions of Slurm differ from each other:

- a name that goes on after its last bracket, ``n[1-2]-ib0``, is refused by 22.05 and expanded by newer versions;
- ``show hostlist`` of such an expression never brackets it again, of its expanded names it does where only the last
  number varies. Names are what is compared here.
"""

import itertools
import random
import re
import shutil
import subprocess
from collections.abc import Callable, Iterable, Iterator, Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import MOST_HOSTS, compress, expand

Answers = Callable[[str, Sequence[str]], Iterable[tuple[str, tuple[str, ...] | None]]]
PREFIXES = ("n", "node", "gpu-a", "rack2-", "cn0", "x1y", "")
SUFFIXES = ("",) * 20 + ("-ib0", ".cluster", "b")
# One scontrol takes 2 ms, one Python subprocess several times that: a shell asks for all.
ASK_ALL = """while IFS= read -r line; do scontrol show "$1" "$line" 2>/dev/null; echo; done"""


def ranges(draw: random.Random, longest: int) -> str:
    """What stands in a bracket: single numbers and ranges, padded or not, of mixed widths, in any order, repeated."""
    parts = []
    for _ in range(draw.choice((1, 1, 2))):
        width, low = draw.choice((0, 0, 2, 3, 5)), draw.choice((0, 1, 7, 9, 10, 98, 99, 100, draw.randrange(2000)))
        high = low + draw.choice((0, 0, 1, 2, longest))
        parts.append(f"{low:0{width}d}" if low == high else f"{low:0{width}d}-{high:0{draw.choice((width, 0))}d}")
    return ",".join([*parts, draw.choice(parts)] if draw.random() < 0.1 else parts)


def expression(draw: random.Random) -> str:
    """Up to four names of up to four brackets, of some 10,000 hosts at most."""
    names = []
    for _ in range(draw.choice((1, 1, 1, 2, 3, 4))):
        brackets = draw.choice((0, 1, 1, 1, 1, 2, 2, 3, 4))
        name = draw.choice(PREFIXES) + "".join(
            f"[{ranges(draw, 12 if brackets < 3 else 2)}]" + (draw.choice(("", "-", "c")) if bracket < brackets else "")
            for bracket in range(1, brackets + 1))
        names.append(name + (draw.choice(SUFFIXES) if brackets else str(draw.randrange(120))))
    return ",".join(names)


def hosts(draw: random.Random) -> tuple[str, ...]:
    """Plain names: runs of numbers, some padded, some repeated, some out of order, several prefixes."""
    found: list[str] = []
    for _ in range(draw.choice((1, 2, 3, 6))):
        prefix, width, low = draw.choice(PREFIXES), draw.choice((0, 0, 2, 3)), draw.choice((0, 1, 8, 9, 97, 99, 998))
        found += [f"{prefix or 'z'}{number:0{width}d}" for number in range(low, low + draw.choice((1, 1, 2, 4, 15)))]
        found += draw.choice(((), (), ("login",), ("n1-ib0",), (found[0],)))
    if draw.random() < 0.2:
        draw.shuffle(found)
    return tuple(found)


@pytest.fixture(scope="module")
def ask(tmp_path_factory: pytest.TempPathFactory) -> Answers:
    if shutil.which("scontrol") is None:
        pytest.skip("scontrol is not installed (Debian: slurm-client)")
    conf = tmp_path_factory.mktemp("slurm") / "slurm.conf"
    conf.write_text("ClusterName=x\nSlurmctldHost=localhost\n")  # scontrol wants one, a controller it does not

    def answers(what: str, expressions: Sequence[str]) -> Iterator[tuple[str, tuple[str, ...] | None]]:
        """(expression, lines), lines None where Slurm refuses it."""
        done = subprocess.run(["bash", "-c", ASK_ALL, "bash", what], input="\n".join(expressions) + "\n", text=True,
                              capture_output=True, check=True, env={"PATH": "/usr/bin:/bin", "SLURM_CONF": str(conf)})
        lines = iter(done.stdout.splitlines())
        for asked in expressions:
            yield asked, tuple(itertools.takewhile(bool, lines)) or None

    return answers


NUMBERS = [300, pytest.param(10_000, marks=pytest.mark.prove)]


@pytest.mark.parametrize("number", NUMBERS)
def test_names_are_those_of_scontrol(ask: Answers, number: int) -> None:
    draw = random.Random(number)
    refused = 0
    for asked, names in ask("hostnames", [expression(draw) for _ in range(number)]):
        if names is None:  # 22.05 and a suffix
            refused += 1
            assert any(re.search(r"\][^\]]+$", name) for name in re.split(r",(?![^\[]*\])", asked)), asked
        else:
            assert expand(asked) == names, asked
    assert refused < number / 2


@pytest.mark.parametrize("number", NUMBERS)
def test_lists_are_those_of_scontrol(ask: Answers, number: int) -> None:
    draw = random.Random(number)
    asked = [hosts(draw) for _ in range(number)]
    for names, (_, line) in zip(asked, ask("hostlist", [",".join(names) for names in asked]), strict=True):
        assert (compress(names),) == line, names


# Written by `scontrol show hostnames` and `scontrol show hostlist` of Slurm 22.05.8: a list, its hosts, the list again.
SLURM_LISTS = table(__file__, "nodelist.toml", "slurm_lists")


@pytest.mark.parametrize("line", SLURM_LISTS.strip().splitlines())
def test_host_lists_as_slurm_reads_and_writes_them(line: str) -> None:
    text, names, again = line.split(" | ")
    assert expand(text) == tuple(names.split()) and compress(names.split()) == again


@pytest.mark.parametrize(("text", "names"), table(__file__, "nodelist.toml", "several_brackets"))
def test_several_brackets_run_in_slurms_order(text: str, names: str) -> None:
    """The last varies fastest, then the first: as Slurm 22.05 to 26.05 have it, and no nested loop would."""
    assert expand(text) == tuple(names.split())


@given(st.lists(st.from_regex(r"[a-c-]{0,2}(0?[0-9]{1,2})?", fullmatch=True).filter(bool)))
def test_a_compressed_list_expands_to_the_same_hosts_in_the_same_order(names: list[str]) -> None:
    assert expand(compress(names)) == tuple(names)


@given(st.integers(0, 10**6), st.integers(1, 300))
@example(1, MOST_HOSTS)
def test_a_run_of_numbers_is_one_range(first: int, count: int) -> None:
    names = [f"node{number:07d}" for number in range(first, first + count)]
    text = names[0] if count == 1 else f"node[{first:07d}-{first + count - 1:07d}]"
    assert compress(names) == text and expand(text) == tuple(names)


@pytest.mark.parametrize(("text", "rule"), [
    *((text, "Slurm allows at most 65536") for text in (
        f"n[1-{MOST_HOSTS + 1}]", "n[1-60000],m[1-60000]", "n[0-999][0-999]", "n[1-999999999999999999]")),
    *((text, "bracket form") for text in (
        "n[1", "n1]", "n[4-1]", "a,,b", "n[a]", "n[]", " n1", "n[1-]", "n[-1]", "n[1-2-3]", ",", f"n[{'9' * 100_000}]")),
], ids=lambda value: value[:30])
def test_what_is_no_host_list(text: str, rule: str) -> None:
    with pytest.raises(HpcMpError, match=rule) as caught:
        expand(text)
    assert len(str(caught.value)) < 500
