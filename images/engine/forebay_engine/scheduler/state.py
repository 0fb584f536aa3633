"""What the scheduler keeps of a request, and what it hands out each step."""

from __future__ import annotations

import enum
from dataclasses import dataclass, field

from forebay_engine.types import EngineRequest, FailEvent, PullSource, SequenceStep, TokenEvent
from forebay_wire.transfer import TokenLogprob


@dataclass(frozen=True, slots=True)
class SchedulerConfig:
    max_running: int
    """Requests with blocks at a time: running, pulling and reserved ones."""

    max_waiting: int
    """Requests without blocks at a time; the next one gets a 429."""

    max_batched_tokens: int
    """Tokens of one step. Decode tokens come first; prompts share what is left."""

    max_model_len: int
    """Prompt and output tokens of one request at most. The pool's size is a second limit."""

    chunked_prefill: bool = True
    """False: a prompt is one step, however long (for comparison only)."""

    max_pulls: int = 8
    """Pulls under way at a time. With the cap on their blocks (SequenceTable.pull_block_cap) it keeps pulls from
    holding all blocks while nothing that runs can grow and finish (the deadlock of vLLM #30659)."""

    def __post_init__(self) -> None:
        for name in ("max_running", "max_waiting", "max_batched_tokens", "max_model_len", "max_pulls"):
            value = getattr(self, name)
            if value < 1:
                raise ValueError(f"scheduler setting {name} is {value}; it must be at least 1")


class Status(enum.Enum):
    WAITING = "waiting"
    """Holds no blocks, or only a reservation's."""

    PULLING = "pulling"
    """Has its blocks; a read from another worker is landing in them."""

    RUNNING = "running"
    ABORTED = "aborted"
    """Was pulling when it was aborted: its blocks are freed when the read has ended."""

    FINISHED = "finished"


@dataclass(slots=True, eq=False)
class SequenceState:
    request: EngineRequest
    order: int
    """Place in line, given once; a preempted sequence keeps it."""

    token_ids: list[int] = field(default_factory=list)
    """Prompt and output ids."""

    outputs: list[int] = field(default_factory=list)
    """Output ids, those of request.output_ids included."""

    computed: int = 0
    """Tokens whose KV is in `blocks`."""

    blocks: list[int] = field(default_factory=list)
    status: Status = Status.WAITING
    pull: PullSource | None = None
    """Set until the pull has been tried once."""

    reserved: list[int] = field(default_factory=list)
    """Blocks of an adopted reservation, until admission."""

    early: int = 0
    """The first `early` reserved blocks were filled while prefill still ran."""

    keys: list[bytes] = field(default_factory=list)
    """Prefix keys of the first full blocks of token_ids; grows as they are needed."""

    published: int = 0
    """Full blocks registered in the prefix cache (or equal to some that are)."""

    reported: int = 0
    """Full blocks reported in StepResult.progressed."""

    expected_cached: int = 0
    """While waiting: tokens that the cache had when last looked. An estimate, for queued_prefill_tokens only."""

    cached_tokens: int | None = None
    """Prompt tokens whose KV the prefix cache had at the first admission; None before it."""

    preemptions: int = 0
    spoke: bool = False
    """The first event is out."""

    prompt_logprobs: list[TokenLogprob] = field(default_factory=list)

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def prompt_tokens(self) -> int:
        return len(self.request.prompt_ids)

    @property
    def remaining(self) -> int:
        """Known tokens without KV. 1 means that the sequence decodes (or is at its prompt's last token)."""
        return len(self.token_ids) - self.computed

    @property
    def pullable(self) -> int:
        """Tokens whose KV a pull gives. The last known token is always computed here: its logits give the next one."""
        return min(self.pull.num_tokens, len(self.token_ids) - 1) if self.pull is not None else 0

    @property
    def wants_prompt_logprobs(self) -> bool:
        """Whether the prompt's logits are still owed: then no part of it may come from a cache."""
        return self.request.params.prompt_logprobs is not None and not self.spoke and not self.request.output_ids


@dataclass(slots=True)
class PullOrder:
    """Read remote_blocks[i] of the source into local_blocks[i], then complete the lease; then Scheduler.pull_done().

    The lists may be empty: everything is here already (prefix cache, early pulls) and only the lease is to be ended.
    """

    request_id: str
    source: PullSource
    remote_blocks: list[int]
    local_blocks: list[int]


@dataclass(slots=True)
class StepPlan:
    """One round. Steps share lists with the scheduler: read-only, and valid until update()."""

    steps: list[SequenceStep] = field(default_factory=list)
    pulls: list[PullOrder] = field(default_factory=list)
    preempted: list[str] = field(default_factory=list)
    """Lost their blocks; those with `hold` need a new lease epoch."""

    failed: list[FailEvent | TokenEvent] = field(default_factory=list)
    """Last events of requests that end without a step, e.g. a continuation of an answer that was complete."""


@dataclass(slots=True)
class StepResult:
    events: list[TokenEvent] = field(default_factory=list)
    finished_holds: list[SequenceState] = field(default_factory=list)
    """Prefills to hand off: the scheduler has let go of them, their blocks keep their references for the lease."""

    progressed: list[tuple[str, list[int]]] = field(default_factory=list)
    """Hold requests that computed further full blocks: (request id, all full blocks so far)."""
