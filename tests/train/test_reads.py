"""Of a checkpoint each byte is read once at a resume, by all ranks together."""

import json
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from math import prod
from pathlib import Path
from typing import Any

import pytest
import torch
from layouts import VARIANTS, job, prepare, start, write_text
from memory import measure_from_here
from planting import planted
from ranks import exit_codes, run_ranks
from safetensors.torch import save_file

from hpc_mp.layout.models.families.llama import FAMILY as LLAMA
from hpc_mp.layout.models.family import Weight
from hpc_mp.rundir import newest_complete
from hpc_mp.train.model import initial
from hpc_mp.train.parallel.fill import fill_part

PP2DP2 = ["job.ranks_per_node=4", "parallel.pipeline=2", "parallel.zero=0", "parallel.microbatches=2"]
DP4Z3 = ["job.ranks_per_node=4", "parallel.zero=3", "parallel.microbatches=2"]
Read = tuple[str, int, int]  # file, first byte, bytes


def reads_of_resume(directory: Path, model: str, before: Sequence[str],
                    after: Sequence[str]) -> tuple[list[Read], dict[str, int]]:
    """What ranks read of the files of tensors as they go on, and the sizes of these files."""
    first = job(directory, model, [*before, "train.steps=1"])
    run = start(first)
    assert exit_codes(first.ranks, run.job, timeout=900) == [0] * first.ranks
    saved, _ = newest_complete(run.checkpoints)
    assert saved is not None
    spec = job(directory, model, [*after, "train.steps=2"])
    prepare(spec, run)
    sizes = {path.name: path.stat().st_size for path in saved.glob("*.safetensors")}
    notes = directory / "notes"
    notes.mkdir()

    @planted(os, "pread")
    def noted(plain: Any, descriptor: int, count: int, begin: int) -> bytes:
        content: bytes = plain(descriptor, count, begin)
        with (notes / str(os.getpid())).open("a") as file:
            file.write(json.dumps([Path(os.readlink(f"/proc/self/fd/{descriptor}")).name, begin, len(content)]) + "\n")
        return content

    assert exit_codes(spec.ranks, run.job, noted, timeout=900) == [0] * spec.ranks
    lines = [line for path in notes.iterdir() for line in path.read_text().splitlines()]
    return [(name, begin, count) for name, begin, count in map(json.loads, lines) if name in sizes], sizes


def counted(file: str, name: str) -> int:
    """A number of this process, in bytes."""
    (line,) = [line for line in Path("/proc/self", file).read_text().splitlines() if line.startswith(f"{name}:")]
    return int(line.split()[1]) << 10 * line.endswith("kB")


@pytest.mark.parametrize(("stored", "shape", "box"), [
    (torch.float32, (1024, 4096), (slice(0, 1024), slice(0, 4096))),
    (torch.bfloat16, (2048, 4096), (slice(512, 768), slice(0, 4096))),
    (torch.float64, (512, 4096), (slice(100, 103), slice(0, 4096))),
    (torch.float16, (64, 131072), (slice(0, 64), slice(65536, 131072))),
    (torch.bfloat16, (4, 64, 32768), (slice(1, 3), slice(16, 32), slice(0, 32768))),
    (torch.float32, (1024, 4096), (slice(7, 900), slice(1000, 2000))),
], ids=["whole", "rows", "few rows", "columns", "rows of experts", "short parts of rows"])
def test_of_a_checkpoint_a_rank_reads_its_own_part_alone(tmp_path: Path, stored: torch.dtype, shape: tuple[int, ...],
                                                         box: tuple[slice, ...]) -> None:
    """Of 96 MiB in two files; no page of them counts as its memory."""
    names = [f"model.layers.{layer}.mlp.up_proj.weight" for layer in range(6)]
    values = torch.arange(prod(shape), dtype=torch.int32).remainder_(251).view(shape).to(stored)
    for part in (0, 1):
        save_file({name: values.clone() for name in names[part::2]}, path := tmp_path / f"{part}.safetensors")
        with path.open("rb") as file:
            os.fsync(file.fileno())
            os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    index = {"weight_map": {name: f"{number % 2}.safetensors" for number, name in enumerate(names)}}
    (tmp_path / "model.safetensors.index.json").write_text(json.dumps(index))

    def process() -> tuple[int, int]:
        source, read, mapped = initial.read(tmp_path, LLAMA), counted("io", "read_bytes"), counted("status", "RssFile")
        for name in names:
            target = torch.empty([part.stop - part.start for part in box])
            fill_part(target, Weight(name, shape, cut=0), box, source)
            assert torch.equal(target, values[box].float())
        return counted("io", "read_bytes") - read, counted("status", "RssFile") - mapped

    ((read, mapped),) = run_ranks(1, process)
    assert mapped < 16 << 20, f"{mapped >> 20} MiB"
    row = shape[-1] if (box[-1].stop - box[-1].start) * stored.itemsize < initial.SHORT else box[-1].stop - box[-1].start
    share = 6 * stored.itemsize * prod(part.stop - part.start for part in box[:-1]) * row
    assert read <= 1.1 * share + (1 << 19), f"{read >> 10} KiB of {share >> 10}"


@pytest.mark.parametrize(("box", "whole_rows", "most"), [
    ((slice(0, 2048), slice(1024, 1536)), False, 16 << 20),
    ((slice(0, 1024), slice(0, 8192)), False, 16 << 20),
    ((slice(0, 2048), slice(1024, 1536)), True, 64 << 20),
], ids=["short parts of rows", "rows", "control: whole rows, and then the parts"])
def test_a_part_takes_a_chunk_of_memory_beside_itself(tmp_path: Path, box: tuple[slice, ...], whole_rows: bool,
                                                      most: int) -> None:
    """A weight of 64 MiB is read in chunks."""
    shape, name = (2048, 8192), "model.layers.0.mlp.down_proj.weight"
    save_file({name: torch.zeros(shape)}, tmp_path / "model.safetensors")

    def process() -> int:
        source = initial.read(tmp_path, LLAMA)
        weight, target = Weight(name, shape, cut=1), torch.ones([part.stop - part.start for part in box])
        measure_from_here()
        before = counted("status", "VmRSS")
        fill_part(target, weight, box, (lambda weight, box: source(weight, (box[0], slice(0, shape[1])))[:, box[1]])
                  if whole_rows else source)
        return counted("status", "VmHWM") - before

    (growth,) = run_ranks(1, process)
    assert (growth >= most) is whole_rows, f"{growth >> 20} MiB"


@pytest.mark.parametrize("layout", [PP2DP2, DP4Z3], ids=["pp2dp2", "dp4zero3"])
def test_every_byte_is_read_once(layout: list[str], tmp_path: Path) -> None:
    write_text(tmp_path)
    reads, sizes = reads_of_resume(tmp_path, "gpt2-untied", layout, layout)
    assert max(Counter(reads).values()) == 1
    assert {name: sum(count for file, _, count in reads if file == name) for name in sizes} == sizes


@pytest.mark.prove
@pytest.mark.timeout(1800)
def test_every_byte_of_gibibytes_is_read_once_by_eight_ranks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Parameters and two moments in fp32: 3.8 GiB, and three times as much in memory. It goes on with half as many tensor ranks:
    a block is read again where one part ends and another begins, or where it holds what tensor ranks have in common."""
    if shutil.disk_usage(tmp_path).free < 12 << 30:
        pytest.skip("needs 12 GiB of disk")
    write_text(tmp_path)
    large = ('model_type = "gpt2", n_layer = 2, n_embd = 1024, n_head = 8, vocab_size = 300000, n_positions = 32, '
             "resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0")
    monkeypatch.setitem(VARIANTS, "large", large)
    common = ["job.ranks_per_node=8", 'train.precision="fp32"', "train.global_batch=2", "data.sequence_length=8"]
    reads, sizes = reads_of_resume(tmp_path, "large", [*common, "parallel.tensor=8"],
                                   [*common, "parallel.tensor=4", "parallel.zero=1"])
    total, read = sum(sizes.values()), sum(count for _, _, count in reads)
    print(f"{total / 2**30:.2f} GiB in {len(sizes)} files, {read / 2**30:.2f} GiB read")
    assert total > 3 << 30
    assert total <= read + len(sizes) * 2**20 and read < 1.12 * total
