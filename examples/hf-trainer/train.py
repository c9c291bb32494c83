"""A small Llama learns Python from Python's own library with the Trainer of Hugging Face: nothing is downloaded."""

import os
import sysconfig
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM, PrinterCallback, Trainer, TrainerCallback, TrainingArguments, set_seed

STEPS, EVERY, LENGTH = 40, 10, 64
RUN = Path(os.environ.get("HPC_MP_RUN", "."))
SAVED = RUN / "checkpoints"


def text() -> list[dict[str, torch.Tensor]]:
    """Each byte is a token: rows of some modules of the standard library."""
    library = Path(sysconfig.get_paths()["stdlib"])
    source = b"".join((library / name).read_bytes() for name in ("argparse.py", "ast.py", "inspect.py", "typing.py"))
    rows = torch.frombuffer(bytearray(source), dtype=torch.uint8).long()
    return [{"input_ids": row, "labels": row} for row in rows[:len(rows) // LENGTH * LENGTH].view(-1, LENGTH)]


class Curve(TrainerCallback):
    """What the Trainer says of its steps, as lines and as the curve of the run."""

    def on_log(self, args: Any, state: Any, control: Any, logs: dict[str, float] | None = None, **_: Any) -> None:
        if not state.is_world_process_zero or not logs or "loss" not in logs:
            return
        print(f"step {state.global_step} loss {float(logs['loss']):.4f}")
        with suppress(ImportError):
            import hpc_mp

            hpc_mp.log(step=state.global_step, loss=float(logs["loss"]), learning_rate=float(logs["learning_rate"]),
                       grad_norm=float(logs["grad_norm"]), tokens=args.train_batch_size * args.world_size * LENGTH)


set_seed(0)
model = LlamaForCausalLM(LlamaConfig(vocab_size=256, hidden_size=64, intermediate_size=128, num_hidden_layers=2,
                                     num_attention_heads=4, max_position_embeddings=LENGTH))
trainer = Trainer(
    model=model, train_dataset=text(), callbacks=[Curve()],
    args=TrainingArguments(
        output_dir=str(SAVED), max_steps=STEPS, save_steps=EVERY, logging_steps=1, per_device_train_batch_size=4,
        learning_rate=3e-3, report_to=[], disable_tqdm=True, ddp_find_unused_parameters=False,
        use_cpu=not torch.cuda.is_available()))  # without GPUs it has to be told so: else each rank would train alone
trainer.remove_callback(PrinterCallback)
whole = []
if os.environ.get("HPC_MP_RESUME"):  # trainer_state.json is the last file of a checkpoint: without it one is not whole
    whole = sorted((path.parent for path in SAVED.glob("checkpoint-*/trainer_state.json")), key=lambda path: int(path.name[11:]))
trainer.train(resume_from_checkpoint=str(whole[-1]) if whole else None)
