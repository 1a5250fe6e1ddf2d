from tests.support.small_model import model_folder  # noqa: F401 - fixtures
