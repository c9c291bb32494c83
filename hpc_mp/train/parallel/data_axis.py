"""The data axis: the parts of parameters, gradients and optimizer state that ranks hold, and the reduction of gradients.

==== =========================================== ======================================== =======================================
zero held between steps by each rank of the axis and, while a step computes               gradients are summed
==== =========================================== ======================================== =======================================
0    everything                                  all gradients                            once per step
1    its part of masters and optimizer state     all parameters and gradients             once per step
2    the same                                    all parameters, its part of gradients    after every microbatch
     and those of the unit whose backward runs
3    the same                                    the running unit, its part of gradients  after every microbatch
==== =========================================== ======================================== =======================================

With ZeRO-2 and 3 too, a schedule may sum gradients once per step: then ranks hold all gradients, and microbatches accumulate in
them. Parameters of ZeRO-3 may lie in host memory between uses, see ``host_parameters``. With a shard degree, replicas of a part
all-reduce it once, at the end of a step. If masters and computation have the same format, the masters lie inside the parameters;
otherwise ranks hold both. Parameters that are not trained have neither masters, gradients nor state, and the format of
computation, or of masters if the model never trains them; with ZeRO-3 ranks hold their parts and gather them as all others. The
loss is divided by the number of labels of the global batch before the backward, so that every reduction is a plain sum.
"""

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace

import torch
from torch import nn

from hpc_mp.layout.flat import FlatLayout, ParameterSlot
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.schedule import Schedule
from hpc_mp.train.device.precision import PRECISIONS, Precision
from hpc_mp.train.parallel.collectives import Running, all_gather, all_reduce
from hpc_mp.train.parallel.gradients import Sink, Slabs, UnitGradient
from hpc_mp.train.parallel.groups import Axis, Groups
from hpc_mp.train.parallel.host_parameters import Bus, HostPart


class Unit:
    """One unit of a stage: its flat parameter as the modules see it, and this rank's part of the masters.

    Attributes:
        parameters: name -> view of ``whole``.
        sinks: name -> destination of the parameter's gradient; empty if they are not trained.
        master: this rank's part, (part,), in the masters' format.
        away: this rank's part in host memory; None: it is on the device.
    """

    def __init__(self, layout: FlatLayout, shard: Axis, precision: Precision, device: torch.device, gathers: bool,
                 away: HostPart | None = None) -> None:
        self.layout, self.shard, self.gathers, self.away = layout, shard, gathers, away
        self.whole = torch.empty(layout.padded, dtype=precision.compute, device=device)
        self._bytes = self.whole.untyped_storage().nbytes()
        begin = shard.rank * layout.part
        self._own = self.whole[begin:begin + layout.part]
        self._inside = precision.master == precision.compute and not gathers
        if away is not None:
            self.master = away.master
        else:
            self.master = self._own if self._inside else torch.empty_like(self._own, dtype=precision.master)
        self.parameters = {slot.weight.name: self._parameter(slot) for slot in layout.slots}
        self.sinks: dict[str, Sink] = {}
        self._arriving = Running()
        if gathers:
            self.whole.untyped_storage().resize_(0)

    def _parameter(self, slot: ParameterSlot) -> nn.Parameter:
        """Return a view with its own version counter, so that an unshard is no change of a tensor that autograd has saved."""
        view = self.whole.data[slot.begin:slot.begin + slot.size].view(slot.shape)
        return nn.Parameter(view, requires_grad=slot.weight.trained)

    def filled(self) -> None:
        """Publish values that the host has written into the masters."""
        if self.away is not None:
            self.away.filled()
        self.publish()

    def publish(self) -> None:
        """Distribute new values of the masters. A unit that is unsharded for each use gets them at its next request."""
        if not self.gathers:
            self._fill()

    def request(self) -> None:
        """Begin to unshard the parameters, which are needed soon (prefetch)."""
        if self.gathers and self.whole.untyped_storage().nbytes() == 0:
            self.whole.untyped_storage().resize_(self._bytes)
            self._fill()

    def need(self) -> None:
        """Unshard the parameters, and wait for them."""
        self.request()
        self._arriving.wait()

    def release(self) -> None:
        """Free the unsharded parameters."""
        if self.gathers:
            self._arriving.wait()
            self.whole.untyped_storage().resize_(0)

    @torch.no_grad()
    def _fill(self) -> None:
        self._arriving.wait()
        if self.away is not None:
            self._arriving = self.away.arrive(self._own, self._gather)
            return
        if not self._inside:
            self._own.copy_(self.master)
        self._arriving = self._gather()

    def _gather(self) -> Running:
        return all_gather(self.whole, self._own, self.shard)


class TrainedUnit(Unit):
    """A unit whose parameters are trained, with its gradient."""

    def __init__(self, layout: FlatLayout, shard: Axis, gradient: UnitGradient, precision: Precision, gathers: bool,
                 away: HostPart | None = None) -> None:
        super().__init__(layout, shard, precision, gradient.held.device, gathers, away)
        self.gradient = gradient
        self.sinks = {slot.weight.name: Sink(gradient, slot) for slot in layout.slots}
        self._collected: set[str] = set()

    def collect(self, name: str) -> None:
        """Move autograd's gradient of a parameter to its sink. Each stage that shares the parameter may call this."""
        if name not in self._collected:
            self._collected.add(name)
            self.parameters[name].register_post_accumulate_grad_hook(self.sinks[name].collect)


class DataAxis:
    """All units of a rank, and the order in which their gradients are summed.

    Args:
        units: the rank's units, by name.
        stages: stage of the rank -> names of its units.
        layout: gives the ZeRO stage, which makes no difference for a unit without other shards; if parameters are offloaded,
            such units too lie in host memory.

    Attributes:
        units: the rank's units, by name; ``trained``: those of them that have gradients.
        stages: stage of the rank -> its units; ``reduced``: those of them that have gradients.
    """

    def __init__(self, units: Mapping[str, FlatLayout], stages: Mapping[int, Iterable[str]], schedule: Schedule, groups: Groups,
                 layout: Layout, device: torch.device) -> None:
        precision, zero = PRECISIONS[layout.precision], layout.zero
        reductions = Counter(action.stage for action in schedule.ranks[groups.pipeline] if action.kind == "REDUCE")
        once = any(count < schedule.microbatches for count in reductions.values())  # per step, not per microbatch
        bus = Bus(device) if "parameters" in layout.offload else None
        self.ties, self.slabs = groups.ties, Slabs(precision.master, device)
        self.units: dict[str, Unit] = {}
        self.trained: dict[str, TrainedUnit] = {}
        for name, flat in units.items():
            holders = groups.holders(flat.of_experts)
            alone = holders.shard.size == 1
            formats = precision if flat.trained else replace(precision, master=precision.compute)
            if flat.fixed:
                formats = replace(precision, compute=precision.master)
            away = None if bus is None else HostPart(flat.part, formats, bus)
            gathers = away is not None or (zero == 3 and not alone)
            if not flat.trained:
                self.units[name] = Unit(flat, holders.shard, formats, device, gathers, away)
                continue
            count = sum(reductions[stage] for stage, names in stages.items() if name in names)
            gradient = UnitGradient(flat, groups, alone or once or zero <= 1, count, self.slabs)
            self.units[name] = self.trained[name] = TrainedUnit(flat, holders.shard, gradient, formats, gathers, away)
        self.stages = {stage: [self.units[name] for name in names] for stage, names in stages.items()}
        self.reduced = {stage: [self.trained[name] for name in names if name in self.trained] for stage, names in stages.items()}

    def begin(self) -> None:
        """Reset gradients at the beginning of a step."""
        for unit in self.trained.values():
            unit.gradient.begin()

    def announce(self, stage: int) -> None:
        """Announce that the backward which begins is followed by a REDUCE of this stage."""
        for unit in self.reduced[stage]:
            unit.gradient.announce()

    def reduce(self, stage: int) -> None:
        """Begin the reductions of a REDUCE action that have not begun during the backward."""
        for unit in self.reduced[stage]:
            unit.gradient.reduce()

    def finish(self) -> None:
        """Complete all reductions after the last backward. Every part then has the sum over the data axis, and over the stages
        that have the same unit."""
        self.slabs.settle()
        self.slabs.free.clear()
        for unit in self.trained.values():
            unit.gradient.reduce_replicas()
        for unit in self.trained.values():
            unit.gradient.settle()
        for _, unit in sorted(self.trained.items()):  # in the same order on all ranks: two ranks may share several groups
            if unit.layout.tie is not None and len(unit.layout.tie.stages) > 1:
                all_reduce(unit.gradient.part, self.ties[unit.layout.tie.stages]).wait()

    def filled(self) -> None:
        """Publish values that the host has written into the masters."""
        for unit in self.units.values():
            unit.filled()

    def publish(self) -> None:
        """Publish the values of an update."""
        for unit in self.trained.values():
            unit.publish()
