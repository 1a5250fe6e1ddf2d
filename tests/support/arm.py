"""Settings of the tests that run under an emulator of ARM (``scripts/test_arm.sh``)."""

import hypothesis

hypothesis.settings.register_profile(
    "emulated", deadline=None, derandomize=True, suppress_health_check=list(hypothesis.HealthCheck)
)
hypothesis.settings.load_profile("emulated")
