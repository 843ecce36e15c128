"""The checkpoint that a run resumes from: memory, journal and history must belong to it."""

from __future__ import annotations

from coordinator.aggregate.memory import Memory
from coordinator.run.errors import RunError, repair_advice
from coordinator.run.folder import MEMORY, Checkpoint, Run
from coordinator.run.journal import Journal


def whole_checkpoint(run: Run, memory: Memory | None, journal: Journal) -> Checkpoint:
    """Return the newest checkpoint that memory has caught up with. Raises `RunError`.

    If a crash left memory behind the newest checkpoint, removes that checkpoint: the round in the
    journal then closes again. Any other memory that does not belong to the checkpoint is refused.
    Completes the history.
    """
    checkpoint, opened = run.latest(), journal.read()
    behind = memory is not None and checkpoint.memory and memory.now < checkpoint.round
    is_open = opened is not None and opened.round == checkpoint.round
    if behind and is_open and not run.is_recorded(checkpoint):  # memory comes before the line
        run.drop_latest()
        checkpoint = run.latest()
    if memory is not None:
        _check_memory(run, memory, checkpoint)
    run.check_journal(checkpoint.round)
    run.warn_of_best(checkpoint)
    run.record_line(checkpoint)
    return checkpoint


def _check_memory(run: Run, memory: Memory, checkpoint: Checkpoint) -> None:
    """Raise `RunError` unless memory is that of the checkpoint."""
    folder, now, round = run.folder / MEMORY, memory.now, checkpoint.round
    if now > round:
        raise RunError(
            f"{folder} is that of round {now}, but the newest checkpoint is that of round {round}: "
            f"a checkpoint is missing; {repair_advice(run.folder)}"
        )
    if checkpoint.memory and now < round:
        raise RunError(
            f"{folder} is {f'that of round {now}' if now else 'missing or empty'}, and the newest "
            f"checkpoint is that of round {round}: {repair_advice(run.folder)}"
        )
