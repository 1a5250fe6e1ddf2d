"""Reads the errors of Ray."""

import ray.exceptions


def cause_of(error: Exception) -> Exception:
    """Return the exception that an actor's method raised. Any other error is returned unchanged."""
    if isinstance(error, ray.exceptions.RayTaskError) and isinstance(error.cause, Exception):
        return error.cause
    return error


def reason_of(error: Exception) -> str:
    """Return the reason of an error, without the stack trace that Ray adds."""
    if (cause := cause_of(error)) is not error:
        return str(cause) or type(cause).__name__
    lines = str(error).strip().splitlines() or [type(error).__name__]
    has_started = not (isinstance(error, ray.exceptions.RayActorError) and error.actor_init_failed)
    return lines[0] if has_started else lines[-1]  # If a start fails, the last line after the trace is the reason.
