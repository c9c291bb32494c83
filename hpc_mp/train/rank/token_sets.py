"""The tokens that a rank trains with: prepared by rank 0, near the rank if they are staged."""

import json
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelShape
from hpc_mp.rundir.staged import stage_directory, staged, staging_root
from hpc_mp.train.data import TokenSet, load_tokens, prepare_held_out, prepare_job
from hpc_mp.train.rank.bootstrap import status
from hpc_mp.train.rank.failures import RankContext
from hpc_mp.train.rank.proof import SignedKeys
from hpc_mp.train.rank.rendezvous import FILES_TIMEOUT
from hpc_mp.train.rank.signals import Stopped

PROGRESS_S = 0.5  # between two progress reports of tokenization


def tokens_of(spec: JobSpec, shape: ModelShape, context: RankContext, store: SignedKeys,
              stop_reason: Callable[[], str | None]) -> tuple[TokenSet, TokenSet | None]:
    """Return the training tokens, and the held-out tokens if the job evaluates. Rank 0 tokenizes the text or finds it in the
    cache; the other ranks wait. All ranks read the same files. ``stop_reason``: called repeatedly by rank 0; returns the reason
    to stop, or None to continue. Raises Stopped on all ranks if rank 0 had to stop."""
    key = "token set"
    if context.who.rank == 0:
        try:
            tokens = _tokenize(spec, shape, context, stop_reason)
        except Stopped as stopped:
            store.set(key, json.dumps({"stopped": str(stopped)}))
            raise
        store.set(key, json.dumps({"directories": [str(token_set.directory) for token_set in tokens]}))
    context.waits.behind(key, 0, lambda: store.wait([key], FILES_TIMEOUT))
    answer = json.loads(store.get(key))
    if "stopped" in answer:
        raise Stopped(answer["stopped"])
    training, *held_out = map(load_tokens, _near([Path(name) for name in answer["directories"]], spec, context, store))
    return training, held_out[0] if held_out else None


def _near(directories: Sequence[Path], spec: JobSpec, context: RankContext, store: SignedKeys) -> Sequence[Path]:
    """Return the token sets to read: with ``data.stage`` copies on this node's own disk, made by the node's first rank;
    otherwise the given ones."""
    root = staging_root() if spec.data.stage else None
    if root is None:
        return directories
    key = f"staged {context.who.node}"
    if context.who.local_rank == 0:
        for directory in directories:
            stage_directory(directory, root)
        store.set(key, "")
    first = next(place.rank for place in context.placement.ranks if (place.node, place.local_rank) == (context.place.node, 0))
    context.waits.behind(key, first, lambda: store.wait([key], FILES_TIMEOUT))
    return [staged(directory, root) for directory in directories]


def _tokenize(spec: JobSpec, shape: ModelShape, context: RankContext, stop_reason: Callable[[], str | None]) -> list[TokenSet]:
    last = [0.0]

    def progress(done: int, total: int) -> None:
        if time.monotonic() - last[0] < PROGRESS_S:
            return
        last[0] = time.monotonic()
        status(context, "preparing data", done=done, total=total)
        reason = stop_reason()
        if reason is not None:
            raise Stopped(reason)

    status(context, "preparing data")
    named = context.run.tokenizer
    begun = Path(named.read_text(encoding="utf-8")).name if named.exists() else None
    tokens = prepare_job(spec, shape.vocabulary, context.run.cache, progress, begun)
    named.write_text(str(tokens.tokenizer_directory), encoding="utf-8")
    held_out = prepare_held_out(spec, shape.vocabulary, context.run.cache, progress, tokens)
    token_sets = [tokens] if held_out is None else [tokens, held_out]
    context.run.tokens.write_text("".join(f"{token_set.directory.name}\n" for token_set in token_sets), encoding="utf-8")
    return token_sets
