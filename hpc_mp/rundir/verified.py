"""The record of a verification: what was compared with Hugging Face's own model, and the largest difference."""

from collections.abc import Mapping
from dataclasses import dataclass

from pydantic import TypeAdapter

REFUSED = 3  # exit code of a verification, behind one line of JSON: value, rule, remedy


@dataclass(frozen=True, slots=True)
class Verified:
    """A verification that has found no difference.

    Attributes:
        model_type, layout: of the job; ``small_layout``: on which its shrunk model was computed, by so many ranks.
        steps: of the optimizer.
        modules, gradients, parameters: numbers of outputs of modules, of gradients and of exported tensors that were compared.
        difference: the largest one.
        versions: library -> its version.
    """

    model_type: str
    layout: str
    small_layout: str
    ranks: int
    steps: int
    modules: int
    gradients: int
    parameters: int
    difference: float
    seconds: float
    versions: Mapping[str, str]

    def words(self) -> str:
        """Return the verification in one line."""
        return (f"{self.model_type} on {self.small_layout}: {self.modules} outputs, {self.gradients} gradients and "
                f"{self.parameters} parameters behind {self.steps} steps equal those of transformers "
                f"{self.versions['transformers']} (largest difference {self.difference:.0e}, {self.seconds:.1f} s)")


FORMAT = TypeAdapter(Verified)
