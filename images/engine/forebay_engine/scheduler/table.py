"""Every request of this worker by where it is, and what they hold of its blocks and places."""

from __future__ import annotations

from bisect import insort
from collections.abc import Iterator

from forebay_engine.kv.blocks import BlockPool
from forebay_engine.scheduler.reservations import Reservations
from forebay_engine.scheduler.state import SchedulerConfig, SequenceState, Status
from forebay_engine.scheduler.waiting import WaitingQueue


class SequenceTable:
    """Plain books: whoever moves a sequence from one list to the next decides why, the table only keeps count."""

    def __init__(self, config: SchedulerConfig, pool: BlockPool) -> None:
        self.config = config
        self.pool = pool
        self.max_tokens = min(config.max_model_len, pool.num_blocks * pool.block_size)
        """Tokens of one sequence at most: the answer ends with "length" there, since a lone sequence must fit."""
        self.pull_block_cap = max(1, pool.num_blocks // 2)
        """Blocks that pulls and reservations may hold together; a single one may hold more."""
        self._watermark = pool.num_blocks // 100
        """Blocks that an admission leaves to those that run already, so that they do not preempt it at once."""
        self.by_id: dict[str, SequenceState] = {}
        self.waiting = WaitingQueue()
        self.adopted: list[SequenceState] = []
        """Waiting with a reservation's blocks; they had their turn when the room was given."""
        self.running: list[SequenceState] = []
        """Oldest first."""
        self.pulling: dict[str, SequenceState] = {}
        """Also aborted ones, until their read has ended."""
        self.ending: set[str] = set()
        """Ids whose pull only ends the lease: the sequence runs already, but pull_done() will come."""
        self.reservations = Reservations()
        self._next_order = 0

    def place_in_line(self) -> int:
        self._next_order += 1
        return self._next_order

    def knows(self, request_id: str) -> bool:
        return request_id in self.by_id or request_id in self.pulling or request_id in self.ending

    # Moves.

    def run(self, state: SequenceState) -> None:
        state.status = Status.RUNNING
        insort(self.running, state, key=lambda other: other.order)

    def back_to_line(self, state: SequenceState) -> None:
        """Take a sequence's blocks; it computes again from its beginning when its turn comes."""
        self.free(state)
        # What it had published is found again at its next admission, unless it is evicted first.
        state.expected_cached = state.published * self.pool.block_size
        state.computed = state.published = state.reported = 0
        state.prompt_logprobs = []
        state.status = Status.WAITING
        self.waiting.add(state)

    # Blocks and places.

    def free(self, state: SequenceState) -> None:
        self.pool.free_blocks(state.blocks)
        state.blocks = []

    def free_reserved(self, state: SequenceState) -> None:
        self.pool.free_blocks(state.reserved)
        state.reserved, state.early = [], 0

    def blocks_for(self, tokens: int) -> int:
        return -(-tokens // self.pool.block_size)

    def slots(self) -> int:
        """Places left for requests with blocks."""
        taken = len(self.running) + len(self.pulling) + len(self.reservations) + len(self.adopted)
        return self.config.max_running - taken

    def headroom(self) -> int:
        """Blocks that an admission must leave free."""
        return self._watermark if self.running else 0

    def pulls_may_hold(self, blocks: int) -> bool:
        """Whether so many more blocks may go to a pull or a reservation."""
        held = self.reservations.blocks
        held += sum(len(state.blocks) for state in self.pulling.values())
        held += sum(len(state.reserved) for state in self.adopted)
        return held == 0 or held + blocks <= self.pull_block_cap

    # Load.

    @property
    def waiting_pulls(self) -> int:
        """Requests whose KV is still on another worker: reads under way, and waiting requests that will read."""
        queued = sum(1 for state in self.waiting if state.pull is not None)
        return len(self.pulling) + len(self.adopted) + queued

    @property
    def queued_prefill_tokens(self) -> int:
        """Tokens that prefill steps still have to compute, of running and waiting requests without a pull."""
        waiting = sum(
            max(1, len(state.token_ids) - state.expected_cached) for state in self.waiting if state.pull is None
        )
        return waiting + sum(state.remaining for state in self.prompts())

    @property
    def resident_decode_tokens(self) -> int:
        """Context tokens of the sequences that decode now."""
        return sum(len(state.token_ids) for state in self.running if state.remaining == 1)

    def prompts(self) -> Iterator[SequenceState]:
        """Running sequences that have more than one token to compute, oldest first."""
        return (state for state in self.running if state.remaining > 1)
