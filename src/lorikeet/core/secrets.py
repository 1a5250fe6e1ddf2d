"""Which environment variables hold keys and passwords."""

SECRET_VARIABLES = (
    "LORIKEET_SERVER__API_KEYS",
    "LORIKEET_SERVER__ADMIN_KEYS",
    "LORIKEET_ADAPTERS__REGISTRY_URL",
    "LORIKEET_CLUSTER__REGISTRY_URL",
    "LORIKEET_BACKEND_KEY",
    "VLLM_API_KEY",
)
"""Once read they are removed, so that no engine or reader process has them."""
