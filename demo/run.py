"""The demo: train on 8 emulated ranks, export, and let plain transformers write some Python."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

HERE = Path(__file__).resolve().parent
LEAST_FALL = 2.0  # of the loss: less would mean that nothing was learned
PROMPT = "import os\n\n\ndef read("


def main() -> int:
    source = Path(sysconfig.get_paths()["stdlib"])
    files = [str(source / "*.py"), str(source / "[a-su-z]*" / "*.py")]  # test/ holds files that are no UTF-8 on purpose
    started = subprocess.run(
        [sys.executable, "-m", "hpc_mp", "launch", str(HERE / "job.toml"), "--on", "local", "--json",
         "--set", f"data.files={json.dumps(files)}"], stdout=subprocess.PIPE, text=True, check=False)
    if started.returncode:
        return started.returncode
    outcome = json.loads(started.stdout)
    run = Path(outcome["run"])
    model = run / "export"
    exported = subprocess.run([sys.executable, "-m", "hpc_mp", "export", str(run), "--output", str(model)], check=False)
    if exported.returncode:
        return exported.returncode
    print(f"\nA sample by plain transformers from {model}:\n", flush=True)
    print("\n".join("    " + line for line in sample(model).splitlines()))
    fall = outcome["first_loss"] - outcome["loss"]
    print(f"\nloss     {outcome['first_loss']:.3f} → {outcome['loss']:.3f} (fell by {fall:.3f})")
    print(f"speed    {outcome['tokens_per_s']:,.0f} tokens/s on 8 emulated ranks")
    print(f"report   {outcome['report']}")
    return 0 if fall >= LEAST_FALL else 1


def sample(model: Path) -> str:
    """A continuation of PROMPT, drawn from the exported model as any user of transformers would."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer
    from transformers.utils import logging

    logging.disable_progress_bar()
    torch.manual_seed(0)
    tokenizer = AutoTokenizer.from_pretrained(model)
    trained = AutoModelForCausalLM.from_pretrained(model)
    ids = tokenizer(PROMPT, return_tensors="pt")
    written = trained.generate(**ids, max_new_tokens=80, do_sample=True, temperature=0.7, top_k=40,
                               pad_token_id=tokenizer.eos_token_id)
    text: str = tokenizer.decode(written[0])
    return text


if __name__ == "__main__":
    sys.exit(main())
