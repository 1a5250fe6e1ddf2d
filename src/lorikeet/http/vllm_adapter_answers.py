"""Writes the answers and errors of vLLM's routes for adapters, in vLLM's words, which clients may match."""

from starlette.responses import PlainTextResponse

from lorikeet.http.errors import ApiError


def load_answer(name: str, *warnings: str) -> PlainTextResponse:
    """Return the answer to a load, with a line for each warning."""
    lines = [f"Success: LoRA adapter '{name}' added successfully."]
    return PlainTextResponse("\n".join(lines + [f"Warning: {warning}" for warning in warnings]))


def unload_answer(name: str) -> PlainTextResponse:
    """Return the answer to an unload."""
    return PlainTextResponse(f"Success: LoRA adapter '{name}' removed successfully.")


def check_load(name: str, source: str) -> None:
    """Check that a load has a name and a source.

    Raises:
        ApiError: 400, a field is missing or empty.
    """
    if not name or not source:
        raise invalid_input("Both 'lora_name' and 'lora_path' must be provided.")


def check_unload(name: str) -> None:
    """Check that an unload has a name.

    Raises:
        ApiError: 400, the name is missing or empty.
    """
    if not name:
        raise invalid_input("'lora_name' needs to be provided to unload a LoRA adapter.")


def already_loaded(name: str, replaced_by: str | None = "load_inplace") -> ApiError:
    """Return the 400 for a name that is in use.

    Args:
        name: the adapter's name.
        replaced_by: the field of the route's body that allows a replacement; None for a route that replaces nothing.
    """
    if replaced_by is None:
        remedy = "Unload it first, or replace it by POST /v1/adapters with 'replace'."
    else:
        remedy = f"If you want to load the LoRA adapter in place, set '{replaced_by}' to True."
    return invalid_input(f"The lora adapter '{name}' has already been loaded. {remedy}")


def adapter_not_found(name: str) -> ApiError:
    """Return the 404 for an unknown adapter."""
    return ApiError(404, f"The lora adapter '{name}' cannot be found.")


def invalid_input(message: str) -> ApiError:
    """Return a 400 with vLLM's error type."""
    return ApiError(400, message, type="InvalidUserInput")
