"""The exceptions of hpc-mp. An ``HpcMpError`` holds the input, the rule that it breaks, and the remedy."""

COMMANDS = ("hpc-mp ", "pip ")  # a remedy with this prefix is a command to type


class HpcMpError(Exception):
    """A mistake in the input that the user can correct. Commands print it and exit 2.

    Args:
        value: the input, as the user wrote it (``"train.steps = -3"``).
        rule: the rule it breaks (``"must be at least 1"``).
        remedy: what to do (``"set train.steps to the number of optimizer steps"``).
        several: each mistake separately, if there are several and the other arguments only summarize them.
    """

    def __init__(self, value: str, rule: str, remedy: str, several: "tuple[HpcMpError, ...]" = ()) -> None:
        super().__init__(value, rule, remedy)
        self.value = value
        self.rule = rule
        self.remedy = remedy
        self.several = several

    def __str__(self) -> str:
        end = "" if self.remedy.endswith((".", "?", "!")) else "."
        first = self.remedy[:1] if self.remedy.startswith(COMMANDS) else self.remedy[:1].upper()
        return f"{self.value}: {self.rule}. {first}{self.remedy[1:]}{end}"


class RunFailed(Exception):
    """A run that was started and failed. Commands print it and exit 1."""
