"""One real server on the embedded model for all tests that only talk to it."""

import openai
import pytest
from tests.server.launching import launched

from quire.hub.model_folder import EMBEDDED_MODEL
from quire.text.tokenizer import Tokenizer

SEED = 5
OPTIONS = {"num_blocks": 512, "max_num_seqs": 16, "max_model_len": 1024, "seed": SEED}


@pytest.fixture(scope="session")
def server():
    with launched(OPTIONS) as running:
        yield running


@pytest.fixture(scope="session")
def guarded(tmp_path_factory):
    """A server with keys, four generations for each tenant; its `http` has one of alice's two.

    key_file: what it reads further keys from; carol's is in it. dave, erin and fred are for
    test_who_sees_what alone, where no call may have been made in their names before. seed: its own.
    """
    file = tmp_path_factory.mktemp("keys") / "keys.txt"
    file.write_text("# who may call, too\ncarol:carol-key-1\n")
    keys = ["alice:alice-key-1", "alice:alice-key-2", "bob:bob-key-1", "operator:operator-key-1"]
    keys += ["dave:dave-key-1", "erin:erin-key-1", "fred:fred-key-1"]
    access = {"api_keys": keys, "api_key_file": str(file), "max_tenant_requests": 4}
    with launched(OPTIONS, **access) as running:
        running.http.headers["Authorization"] = "Bearer alice-key-1"
        running.operator = {"Authorization": "Bearer operator-key-1"}
        running.key_file, running.seed = file, SEED
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
