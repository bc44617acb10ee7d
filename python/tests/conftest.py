"""Options for the tests that need a model: what `make test-python` passes."""

import pytest


def pytest_addoption(parser):
    parser.addoption("--crumb", help="the crumb program")
    parser.addoption("--model", help="SmolLM2 as GGUF")
    parser.addoption("--text", help="a text file")
    parser.addoption("--work", help="folder for what the tests derive from the model, kept for the next run")


@pytest.fixture(scope="session")
def option(request):
    def get(name):
        value = request.config.getoption(name)
        if value is None:
            pytest.skip(f"needs {name}: type make test-python")
        return value

    return get
