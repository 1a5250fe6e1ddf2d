from tests.support.small_model import model_folder, small_arena  # noqa: F401 - fixtures
