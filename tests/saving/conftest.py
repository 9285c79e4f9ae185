import pytest


@pytest.fixture(scope="module")
def path(tmp_path_factory):
    """Each test writes it anew: that is what a file of `save` is for."""
    return tmp_path_factory.mktemp("saving") / "run.safetensors"
