"""One request on its way through a replay."""

from __future__ import annotations


class Job:
    """Mutable on purpose and without a dataclass: a replay makes hundreds of thousands."""

    __slots__ = (
        "arrived",
        "finish_step",
        "first",
        "generated",
        "held_by",
        "last",
        "left",
        "number",
        "order",
        "output",
        "prompt",
        "pull",
        "read_at",
        "reading",
        "refused",
        "slow_gaps",
        "slow_mark",
        "spoke",
    )

    def __init__(self, number: int, arrived: float, prompt: int, output: int) -> None:
        self.number = number
        self.arrived = arrived
        self.prompt = prompt
        self.output = output
        self.generated = 0
        """Output tokens so far; while it decodes, as of its last join."""
        self.left = prompt
        """Known tokens without KV where it is now."""
        self.order = 0
        """Place in line at its worker."""
        self.pull = False
        """Its KV lies on another worker: `held_by`."""
        self.held_by = -1
        self.finish_step = 0
        self.first = -1.0
        """When the first token came; below 0: not yet."""
        self.last = -1.0
        self.slow_gaps = 0
        """Gaps between tokens longer than the TPOT objective."""
        self.slow_mark = 0
        self.spoke = -1.0
        """When its last token came, of a request that was handed on; below 0: it was not. While it decodes, as of its
        last join."""
        self.read_at = -1.0
        """When the last read of its KV began."""
        self.reading = 0.0
        """Seconds that reads of its KV took, their wait for the link included."""
        self.refused = False

    @property
    def known(self) -> int:
        return self.prompt + self.generated
