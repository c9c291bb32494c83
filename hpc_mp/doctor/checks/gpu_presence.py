"""Checks of the presence of all GPUs and of their driver."""

from collections.abc import Iterator, Sequence
from dataclasses import replace

from hpc_mp.base.findings import Severity
from hpc_mp.base.text import counted
from hpc_mp.cluster.node.gpu_driver import GpuDriver, SmiAnswer, ask_smi, read_driver
from hpc_mp.cluster.node.gpu_pci import AmdGpus, read_amd
from hpc_mp.cluster.node.nvidia_smi import GpuReport
from hpc_mp.cluster.node.source import Unavailable
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well, words
from hpc_mp.doctor.checks.per_gpu import NotApplicable, checks_of_gpus, driver_error, seen, usual_of

# Exit codes of nvidia-smi: severity, meaning and remedy.
EXITS: dict[int, tuple[Severity, str, str]] = {int(code): tuple(row) for code, row in words()["gpu-smi"]["exits"].items()}
AROUND = {"infoROM is corrupted": 14, "Unable to determine the device handle": 15}  # printed beside an answer, at any exit code
ALIKE = {"model": "product_name", "memory": "fb_memory_usage/total", "VBIOS": "vbios_version",
         "GSP firmware": "gsp_firmware_version", "infoROM": "inforom_version/img_version",
         "greatest clock": "max_clocks/sm_clock"}
BOARDS = (1, 2, 4, 8)  # GPU counts of NVSwitch boards and their virtual machines


def count(driver: GpuDriver) -> Iterator[Judgement]:
    sides = {"PCI bus": len(driver.on_bus), "driver": len(driver.taken) + len(driver.excluded),
             "nvidia-smi": driver.listed, "/dev/nvidia*": sum(name[len("nvidia"):].isdigit() for name in driver.nodes)}
    counts = {side: number for side, number in sides.items() if number is not None}
    evidence = ", ".join(f"{side} {'says nothing' if number is None else number}" for side, number in sides.items())
    evidence += f"; {driver.complaint}" if driver.listed is not None and driver.complaint else ""
    largest = max(counts.values())
    if driver.kind and largest < driver.kind.gpus:
        yield Judgement("error", f"{evidence}; {driver.kind.name} has {driver.kind.gpus}")
    elif not largest:
        return
    elif driver.nvswitches and len(driver.on_bus) not in BOARDS:
        yield Judgement("error", f"{evidence}; {driver.nvswitches} NVSwitches are there, whose boards have 8 GPUs")
    elif len(set(counts.values())) == 1 and driver.listed is not None:
        right = f", as {driver.kind.name} has" if driver.kind else "; how many there should be is not known"
        yield Judgement("ok", f"{counted(largest, 'GPU')} from all four sides ({', '.join(sides)}){right}")
    elif driver.confined and len(driver.taken) == len(driver.on_bus) and driver.listed:
        yield Judgement("ok", f"{evidence}: this job or container may use {driver.listed} of {largest}")
    elif driver.listed is None and len({counts["PCI bus"], counts["driver"]}) == 1:
        raise Unavailable(driver.complaint)
    else:
        yield Judgement("error", evidence)


def smi(answer: SmiAnswer) -> Iterator[Judgement]:
    code = answer.code or next((code for text, code in AROUND.items() if text in answer.words), 0)
    described = len(answer.smi.gpus) if answer.smi is not None else 0
    attached = (answer.smi.attached if answer.smi is not None else None) or described
    lost = f"{attached} GPUs are attached, {described} of them described" if attached > described and not answer.confined else ""
    if answer.smi is None or (code and attached):
        severity, meaning, remedy = _exit(replace(answer, code=code or answer.code))
        yield Judgement(severity, ": ".join(filter(None, (answer.words, meaning, lost))), fix=remedy)
    elif lost:
        yield Judgement("error", lost, fix=EXITS[15][2])
    elif described:
        yield Judgement("ok", f"nvidia-smi answers; driver {answer.smi.driver}")


def versions(driver: GpuDriver) -> Iterator[Judgement]:
    if not driver.on_bus and driver.loaded is None:
        return
    if driver.loaded is None:
        yield Judgement("error", f"{counted(len(driver.on_bus), 'GPU')} on the bus, no driver loaded", fix=EXITS[9][2])
    elif not driver.libraries:
        yield Judgement("unknown", f"driver {driver.loaded}; no libnvidia-ml.so.VERSION found to compare with")
    elif driver.loaded not in driver.libraries:
        yield Judgement("error", f"driver {driver.loaded} runs, libnvidia-ml is {', '.join(driver.libraries)}", fix=EXITS[18][2])
    else:
        yield Judgement("ok", f"driver and library are both {driver.loaded}")


def device_files(driver: GpuDriver) -> Iterator[Judgement]:
    if driver.loaded is None:
        return
    missing = [name for name in ("nvidiactl", "nvidia-uvm") if name not in driver.nodes]
    if missing:
        yield Judgement("error", f"no /dev/{' and no /dev/'.join(missing)}: CUDA cannot start")
    else:
        yield Judgement("ok", "/dev/nvidiactl and /dev/nvidia-uvm are there")


def alike(answer: SmiAnswer) -> Iterator[Judgement]:
    """Check that the GPUs of a node are of one kind: a slow one slows all. GPUs that the driver cannot read are left out."""
    gpus = [gpu for gpu in seen(answer).gpus if not gpu.failed()]
    well = f"{counted(len(gpus), 'GPU')} {gpus[0].name}, equal in {', '.join(ALIKE)}" if gpus else ""
    yield from or_well(_differing(gpus), well)


def _differing(gpus: Sequence[GpuReport]) -> Iterator[Judgement]:
    for what, path in ALIKE.items():
        values = [gpu.says(path) or "nothing" for gpu in gpus]
        usual = usual_of(values)
        if usual is None and values:
            yield Judgement("warning", f"{what} differs: {', '.join(sorted(set(values)))}")
        for gpu, value in zip(gpus, values, strict=True):
            if usual is not None and value != usual:
                yield Judgement("warning", f"{what} {value}, most others {usual}", str(gpu))


def answers(gpu: GpuReport) -> Judgement | None:
    failed = gpu.failed()
    errors = [f"{driver_error(message)}, for {_some([path for path, text in failed.items() if text == message])}"
              for message in dict.fromkeys(failed.values())]
    return Judgement("error", "; ".join(errors)) if errors else None


def _some(paths: Sequence[str]) -> str:
    return ", ".join(paths[:4]) + (f" and {counted(len(paths) - 4, 'other value')}" if len(paths) > 4 else "")


def recovery(gpu: GpuReport) -> Judgement | None:
    action, reset = gpu.says("gpu_recovery_action"), gpu.says("gpu_reset_status/reset_required")
    drain = gpu.says("gpu_reset_status/drain_and_reset_recommended")
    if action is None and reset is None:
        raise NotApplicable
    if action not in (None, "None"):
        return Judgement("error", f"the driver wants: {action}")
    if "Yes" in (reset, drain):
        return Judgement("error" if reset == "Yes" else "warning", "the driver wants the GPU reset")
    return None


def amd(gpus: AmdGpus) -> Iterator[Judgement]:
    if not gpus.on_bus:
        return
    if gpus.driver is None:
        yield Judgement("error", f"{counted(len(gpus.on_bus), 'AMD GPU')} on the bus, amdgpu is not loaded")
        return
    for (bus, unit), errors in gpus.uncorrected.items():
        if errors:
            yield Judgement("error", f"{counted(errors, 'uncorrected error')} of {unit} since the driver was loaded", bus)
    if gpus.compute != len(gpus.on_bus):
        yield Judgement("warning", f"{counted(len(gpus.on_bus), 'AMD GPU')} on the bus, ROCm can use {gpus.compute}")
    elif not any(gpus.uncorrected.values()):
        yield Judgement("ok", f"{counted(gpus.compute, 'AMD GPU')}, amdgpu {gpus.driver}; little more is looked at")


def _exit(answer: SmiAnswer) -> tuple[Severity, str, str]:
    if answer.code is None:
        severity: Severity = "unknown" if "did not answer" in answer.words else "error"
        return severity, "", "install the driver's tools" if "not on PATH" in answer.words else "look into the kernel log"
    if answer.code in EXITS:
        return EXITS[answer.code]
    signal = -answer.code if answer.code < 0 else answer.code - 128
    return "error", f"ended by signal {signal}" if signal > 0 else "a code without a known meaning", EXITS[255][2]


CHECKS = (
    *checks_of(read_driver, {"gpu-count": count}),
    *checks_of(ask_smi, {"gpu-smi": smi}),
    *checks_of(read_driver, {"gpu-driver": versions, "gpu-device-files": device_files}),
    *checks_of(ask_smi, {"gpu-alike": alike}),
    *checks_of_gpus({"gpu-answers": answers, "gpu-recovery": recovery}),
    *checks_of(read_amd, {"gpu-amd": amd}),
)
