"""Measurement with torch: a GPU, or all processors of the node."""

from collections.abc import Callable, Iterator
from typing import Any

import torch

from hpc_mp.base.text import memory_size
from hpc_mp.doctor.compute.device import Pieces, cpu_kind, repeat
from hpc_mp.doctor.compute.problem import bits, exact

GPU_SIZE, CPU_SIZE = 8192, 2048  # rows and columns of the matrices that load the device
BITS_SIZE = 384  # takes some milliseconds on one core
COPY_BYTES = 256 << 20
BATCH = 8  # products between two timestamps on a GPU
TYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


class TorchDevice:
    """A device measured with torch; ``device`` is "cuda:3" or "cpu"."""

    def __init__(self, device: str) -> None:
        self.device = torch.device(device)
        self.gpu = self.device.type == "cuda"
        torch.backends.cuda.matmul.allow_tf32 = False
        torch.backends.cuda.matmul.allow_bf16_reduced_precision_reduction = False
        if self.gpu:
            torch.cuda.set_device(self.device)
            properties = torch.cuda.get_device_properties(self.device)
            self.kind = f"{properties.name}, {properties.multi_processor_count} SM, {memory_size(properties.total_memory)}"
            self.software = f"torch {torch.__version__}, CUDA {torch.version.cuda}"
            place: list[Any] = [getattr(properties, f"pci_{part}_id", None) for part in ("domain", "bus", "device")]
            self.bus = "{:04x}:{:02x}:{:02x}.0".format(*place) if None not in place else ""  # older torch lacks the fields
        else:
            self.bus = ""
            self.kind = cpu_kind()
            self.software = f"torch {torch.__version__}, {torch.backends.cpu.get_cpu_capability()}"

    def check(self) -> Iterator[tuple[str, bool]]:
        """Yield (name, True if the answer is right) of the exact problem for every type."""
        left, right = (torch.from_numpy(matrix) for matrix in exact())
        answer = left.double() @ right.double()  # on the host; program.py checks the host against problem.KNOWN
        for name, dtype in TYPES.items():
            mine = (left.to(self.device, dtype) @ right.to(self.device, dtype)).cpu()
            yield f"exact {name}", torch.equal(mine, answer.to(dtype))

    def answers(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        """Yield problems whose bits must be the same on equal devices: on a GPU one per type, on CPUs one per core."""
        if self.gpu:
            for name, dtype in TYPES.items():
                left, right = (torch.from_numpy(bits(2048, seed)).to(self.device, dtype) for seed in (1, 2))
                yield f"bits {name}", lambda left=left, right=right: (left @ right).float().cpu().numpy().tobytes()  # type: ignore[misc]
            return
        left, right = (torch.from_numpy(bits(BITS_SIZE, seed)) for seed in (1, 2))
        yield "core", lambda: (left @ right).numpy().tobytes()

    def one_thread(self) -> None:
        """Restrict torch to one thread from now on."""
        torch.set_num_threads(1)

    def load(self, seconds: float) -> Iterator[tuple[str, Pieces]]:
        """Measure matrix products for ``seconds`` in each type (TFLOP/s), then the memory bandwidth (GB/s)."""
        size = GPU_SIZE if self.gpu else CPU_SIZE
        for name, dtype in TYPES.items() if self.gpu else (("fp32", torch.float32),):
            left, right = self._pair(size, dtype)
            out, first = torch.empty_like(left), left @ right
            work = 2 * size**3 / 1e12
            yield f"matmul {name}", self._repeat(lambda a=left, b=right, o=out: torch.mm(a, b, out=o),  # type: ignore[misc]
                                                 work, seconds, lambda o=out, f=first: torch.equal(o, f))  # type: ignore[misc]
        source = torch.zeros(1 << 28 if self.gpu else 1 << 26, device=self.device)
        target = torch.empty_like(source)
        yield "memory", self._repeat(lambda: target.copy_(source), 2 * source.nbytes / 1e9, seconds / 2)

    def copies(self) -> Iterator[tuple[str, Pieces]]:
        """Measure copies between host and GPU and to the next GPU, in GB/s; nothing on CPUs."""
        if not self.gpu:
            return
        host = torch.empty(COPY_BYTES, dtype=torch.uint8, pin_memory=True)
        mine = torch.empty(COPY_BYTES, dtype=torch.uint8, device=self.device)
        yield "host to device", self._repeat(lambda: mine.copy_(host, non_blocking=True), COPY_BYTES / 1e9, 0.3)
        yield "device to host", self._repeat(lambda: host.copy_(mine, non_blocking=True), COPY_BYTES / 1e9, 0.3)
        count = torch.cuda.device_count()
        if count > 1:
            peer = torch.empty(COPY_BYTES, dtype=torch.uint8, device=f"cuda:{((self.device.index or 0) + 1) % count}")
            yield "to peer", self._repeat(lambda: peer.copy_(mine, non_blocking=True), COPY_BYTES / 1e9, 0.3)

    def _pair(self, size: int, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the matrices of the load: full mantissas on a GPU, whose products are reproducible; integers on CPUs."""
        if self.gpu:
            generator = torch.Generator(device=self.device).manual_seed(7)
            left, right = (torch.rand(size, size, device=self.device, generator=generator) - 0.5 for _ in range(2))
        else:
            left, right = (torch.from_numpy(matrix) for matrix in exact(size))
        return left.to(dtype), right.to(dtype)

    def _repeat(self, step: Callable[[], object], work: float, seconds: float, same: Callable[[], bool] | None = None) -> Pieces:
        if not self.gpu:
            return repeat(step, work, seconds, same)
        return repeat(step, work, seconds, same, BATCH, lambda: torch.cuda.synchronize(self.device))._replace(share=None)
