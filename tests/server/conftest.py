"""One real server on the embedded model for all tests that only talk to it."""

import openai
import pytest
from tests.server.launching import SEED, launched, launched_with_keys

from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.tokenizer import Tokenizer

OPTIONS = {"num_blocks": 512, "max_num_seqs": 16, "max_model_len": 1024, "seed": SEED}


@pytest.fixture(scope="session")
def server():
    with launched(OPTIONS) as running:
        yield running


@pytest.fixture(scope="session")
def guarded(tmp_path_factory):
    with launched_with_keys(tmp_path_factory.mktemp("keys"), OPTIONS) as running:
        yield running


@pytest.fixture
def http(server):
    """Plain HTTP; afterwards the server must hold no block, whatever the test did."""
    yield server.http
    server.wait_until(lambda stats: stats["num_held_blocks"] == stats["num_running"] == 0)


@pytest.fixture
def client(server, http):
    """OpenAI's own client."""
    with openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0) as client:
        yield client


@pytest.fixture(scope="session")
def tokenizer():
    return Tokenizer.from_folder(EMBEDDED_MODEL)
