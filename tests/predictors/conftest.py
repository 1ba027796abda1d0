from tests.models.conftest import _one_thread  # noqa: F401
