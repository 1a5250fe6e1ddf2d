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


def already_loaded(name: str, replaced_by: str = "load_inplace") -> ApiError:
    """Return the 400 for a name that is in use. ``replaced_by`` is the field that allows a replacement."""
    return invalid_input(
        f"The lora adapter '{name}' has already been loaded. If you want to load the LoRA adapter in place, "
        f"set '{replaced_by}' to True."
    )


def adapter_not_found(name: str) -> ApiError:
    """Return the 404 for an unknown adapter."""
    return ApiError(404, f"The lora adapter '{name}' cannot be found.")


def invalid_input(message: str) -> ApiError:
    """Return a 400 with vLLM's error type."""
    return ApiError(400, message, type="InvalidUserInput")
