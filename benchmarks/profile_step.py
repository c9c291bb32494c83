"""Pictures of a training step, as torch's profiler sees it on every rank.

    torchrun --nproc-per-node 8 benchmarks/profile_step.py OUT      # needs matplotlib

Trains a small Llama on tensor 2 × pipeline 2 × data 2. Each rank writes ``OUT/rank-N.json``, which chrome://tracing and Perfetto
show; rank 0 draws phases, actions, layers and collectives of a rank of each stage to ``OUT/step.png``.
"""

import json
import os
import sys
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch.profiler import ProfilerActivity, profile

import hpc_mp
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.rank import facts

MODEL = {"model_type": "llama", "num_hidden_layers": 4, "hidden_size": 256, "intermediate_size": 688, "num_attention_heads": 8,
         "vocab_size": 2048, "max_position_embeddings": 128}
SAMPLES, TOKENS, WARM_UP = 16, 128, 3
PHASES = ("forward_backward", "reduce_gradients", "agree", "update", "publish")
COLLECTIVES = ("all-reduce", "all-gather", "reduce-scatter", "all-to-all", "shift")
COLOURS = {"forward_backward": "#c6dbef", "reduce_gradients": "#fdd0a2", "agree": "#dadaeb", "update": "#c7e9c0",
           "publish": "#fdae6b", "F": "#4c78a8", "B": "#f58518", "SEND": "#b0b0b0", "RECV": "#d8d8d8", "REDUCE": "#e45756",
           "all-reduce, tensor": "#72b7b2",
           "all-reduce": "#9467bd", "all-gather": "#54a24b", "reduce-scatter": "#e45756", "model.layers": "#9ecae9"}
LETTERS = 200  # that fit into the width of the picture
Span = tuple[str, float, float]  # name, begin and end in milliseconds


def lane_of(name: str) -> str | None:
    """The lane of the picture for a span of the profiler."""
    if name in PHASES:
        return "phase"
    if " of stage " in name:
        return "action"
    if name.startswith("model.layers."):
        return "layer"
    return "collective" if name.startswith(COLLECTIVES) else None


def lanes_of(trace: Path) -> dict[str, list[Span]]:
    """The spans of each lane, from a rank's trace."""
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event.get("cat") == "user_annotation"]
    begin = min(event["ts"] for event in events if event["name"] == PHASES[0])
    lanes: dict[str, list[Span]] = {}
    for event in events:
        if (lane := lane_of(event["name"])) is not None:
            start = (event["ts"] - begin) / 1000
            lanes.setdefault(lane, []).append((event["name"], start, start + event["dur"] / 1000))
    return lanes


def draw(ranks: Mapping[str, Path], out: Path) -> None:
    from matplotlib import pyplot

    names = ("phase", "action", "layer", "collective")
    figure, axes = pyplot.subplots(len(ranks), 1, figsize=(15, 3.2 * len(ranks)), sharex=True)
    pictures = {title: lanes_of(trace) for title, trace in ranks.items()}
    letter = max(end for lanes in pictures.values() for _, _, end in lanes["phase"]) / LETTERS
    for panel, (title, lanes) in zip(axes, pictures.items(), strict=True):
        for row, lane in enumerate(names):
            _draw_lane(panel, len(names) - row, lanes.get(lane, ()), letter)
        kinds = [*PHASES, *sorted({name for name, _, _ in lanes["collective"]})]
        panel.legend([pyplot.Rectangle((0, 0), 1, 1, color=_colour(kind)) for kind in kinds], kinds, loc="center left",
                     bbox_to_anchor=(1.0, 0.5), fontsize=8)
        panel.set_yticks([len(names) - row + 0.4 for row in range(len(names))], names)
        panel.set_title(title, loc="left")
    axes[-1].set_xlabel("milliseconds since the beginning of the step")
    figure.tight_layout()
    figure.savefig(out, dpi=110)


def _colour(name: str) -> str:
    return next(colour for kind, colour in COLOURS.items() if name.startswith(kind))


def _draw_lane(panel: Any, row: int, spans: Iterable[Span], letter: float) -> None:
    """Draw a lane. ``letter``: milliseconds that a letter is wide."""
    for name, begin, end in spans:
        panel.broken_barh([(begin, end - begin)], (row, 0.8), facecolor=_colour(name), edgecolor="white", linewidth=0.4)
        label = short(name)
        if end - begin > letter * len(label):
            panel.text((begin + end) / 2, row + 0.4, label, ha="center", va="center", fontsize=7)


def short(name: str) -> str:
    """A name as it fits into its bar: ``F2`` for the forward of microbatch 2."""
    if " of stage " in name:
        kind, _, microbatch = name.partition(" of stage ")
        return f"{kind}{microbatch.rpartition(' ')[2]}"
    return name.removeprefix("model.layers.")


def main(arguments: Sequence[str]) -> None:
    out = Path(arguments[0])
    torch.set_num_threads(1)
    run = hpc_mp.parallel(MODEL, tp_size=2, pp_size=2, zero=1, microbatches=4, optimizer={"lr": 1e-3})
    ids = torch.randint(MODEL["vocab_size"], (SAMPLES, TOKENS + 1), generator=torch.Generator().manual_seed(0))
    batch = {"input_ids": ids[:, :-1], "labels": ids[:, 1:]}
    for _ in range(WARM_UP):
        run.step(batch)
    with profile(activities=[ProfilerActivity.CPU]) as profiler:
        run.step(batch)
    rank = run.world.who.rank
    out.mkdir(parents=True, exist_ok=True)
    profiler.export_chrome_trace(str(out / f"rank-{rank}.json"))
    run.close()
    if rank == 0:
        first, last = run.world.placement(run.layout.degrees, "auto").groups["pp"][0]
        draw({f"rank {first}: first stage": out / f"rank-{first}.json", f"rank {last}: last stage": out / f"rank-{last}.json"},
             out / "step.png")
    end(run.world.host)


def end(host: Tree) -> None:
    """End this rank's program once no other rank needs it.

    The interpreter is not torn down: its last garbage collection, with gloo's groups and the profiler, ended in a segmentation
    fault in one of some runs.
    """
    facts.barrier(host)
    dist.destroy_process_group()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main(sys.argv[1:])
