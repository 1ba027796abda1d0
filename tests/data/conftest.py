from tests.tasks.conftest import _one_thread  # noqa: F401
