"""What can go wrong with a pipeline, apart from misuse (``TypeError``, ``ValueError``).

PipelineError (RuntimeError)
├── PipelineFailure (ExceptionGroup)   the run ended because a stage or the source failed
├── PipelineStopped (EOFError)         nothing more comes: the source ended, or somebody stopped the run
├── WorkerDied                         the process that worked on an item died; fails that item
├── PoolBroken                         a pool takes no more items; ends the run
└── MissingPackageError (ImportError)  an optional package is not installed
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

__all__ = (
    "MissingPackageError",
    "PipelineError",
    "PipelineFailure",
    "PipelineStopped",
    "PoolBroken",
    "WorkerDied",
)


class PipelineError(RuntimeError):
    """A pipeline cannot do what was asked of it, in the state in which it is."""


class PipelineStopped(PipelineError, EOFError):  # noqa: N818  # it tells of no error
    """Nothing more comes: the source has ended, or the pipeline was stopped."""


class WorkerDied(PipelineError):  # noqa: N818  # says what happened
    """The worker of a pool died (killed, out of memory, crashed) with this item in its hands."""


class PoolBroken(PipelineError):  # noqa: N818  # says what happened
    """A pool takes no more items, and nobody can rebuild it. It ends the run."""


class MissingPackageError(PipelineError, ImportError):
    """An optional package is needed and not installed. The message has the ``pip`` line."""


class PipelineFailure(ExceptionGroup[Exception], PipelineError):  # noqa: N818  # says what happened
    """The run ended early because a stage or the source failed.

    ``__cause__`` is the original exception; ``exceptions`` holds the same one.

    Attributes:
        stage: Name of the stage that failed; ``"source"`` for a source.
    """

    stage: str = ""

    def derive(self, excs: Sequence[Exception], /) -> PipelineFailure:  # type: ignore[override]
        """The same failure with some of its exceptions: what ``except*`` and ``split`` make."""
        return _rebuild(self.message, excs, {"stage": self.stage})

    def __reduce__(self) -> tuple[Any, ...]:
        # Exceptions do not pickle their causes by themselves.
        return _rebuild, (self.message, list(self.exceptions), dict(self.__dict__))


def _rebuild(
    message: str, exceptions: Sequence[Exception], state: dict[str, Any]
) -> PipelineFailure:
    failure = PipelineFailure(message, exceptions)
    failure.__dict__.update(state)
    failure.__cause__ = exceptions[0]
    return failure


def describe(error: BaseException) -> str:
    """Class and message of an exception of the caller's, whatever its ``__str__`` does."""
    try:
        message = str(error)
    except BaseException as mute:  # noqa: BLE001  # nothing that is said of an error may be another error
        message = f"<its message raises {type(mute).__name__}>"
    return f"{type(error).__name__}: {message}"


def pipeline_failure(message: str, original: BaseException, *, stage: str) -> PipelineFailure:
    """The failure of ``stage`` that ``original`` caused.

    A ``SystemExit`` or the like that a stage raises ends the pipeline, not the consumer's program, so
    it is wrapped: a group of plain exceptions can hold none.
    """
    if isinstance(original, Exception):
        inner = original
    else:
        inner = PipelineError(describe(original))
    failure = PipelineFailure(message, [inner])
    failure.stage = stage
    failure.__cause__ = original
    return failure
