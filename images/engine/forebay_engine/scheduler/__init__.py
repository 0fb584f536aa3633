"""Continuous batching: which tokens of which request run in the next step. Pure: no clock, no I/O, no threads."""

from forebay_engine.scheduler.scheduler import Scheduler
from forebay_engine.scheduler.state import (
    PullOrder,
    SchedulerConfig,
    SequenceState,
    Status,
    StepPlan,
    StepResult,
)

__all__ = ["PullOrder", "Scheduler", "SchedulerConfig", "SequenceState", "Status", "StepPlan", "StepResult"]
