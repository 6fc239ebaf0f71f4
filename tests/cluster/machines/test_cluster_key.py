"""Key files of clusters: which are accepted, and how a new one is made."""

import os
import shutil
import ssl
from pathlib import Path

import pytest
from tests.cluster.machines.cluster_keys import KEY, OTHER_KEY

from quire.cluster.machines import cluster_key
from quire.cluster.machines.cluster_key import new_key, read_key, refusal, tls_context
from quire.errors import ConfigurationError

MIDDLE = b"-----BEGIN CERTIFICATE"


def part(key: bytes, index: int) -> bytes:
    """The private key (0) or the certificate (1) of a key file."""
    private, certificate = key.split(MIDDLE)
    return (private, MIDDLE + certificate)[index]


def test_a_key_file_is_read_and_warned_about_if_others_can_read_it(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "key"
    with pytest.raises(ConfigurationError, match="can't be read"):
        read_key(path)
    path.write_bytes(KEY)
    path.chmod(0o640)
    assert read_key(path) == KEY and "mode 640" in caplog.text
    caplog.clear()
    path.chmod(0o400)
    assert read_key(path) == KEY and not caplog.text


@pytest.mark.parametrize(
    "content",
    [
        b"",
        b"8c4d1f0a" * 8,
        b"\xff\xfe",
        part(KEY, 0),
        part(KEY, 1),
        part(KEY, 0) + part(OTHER_KEY, 1),
    ],
    ids=["empty", "hexadecimal", "binary", "no certificate", "no private key", "of two keys"],
)
def test_any_other_file_is_refused_with_the_command_that_makes_a_key(
    content: bytes, tmp_path: Path
) -> None:
    path = tmp_path / "key"
    path.write_bytes(content)
    with pytest.raises(ConfigurationError, match=f"openssl req .* -keyout {path} -out {path}"):
        read_key(path)


@pytest.mark.skipif(shutil.which("openssl") is None, reason="needs the command openssl")
def test_a_new_key_differs_from_the_last_and_can_be_used() -> None:
    first, second = new_key(), new_key()
    assert first != second
    tls_context(first, ssl.PROTOCOL_TLS_SERVER)


def test_without_openssl_the_option_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cluster_key, "NEW_KEY", "no-such-command")
    with pytest.raises(ConfigurationError, match="name it in cluster_key_file"):
        new_key()
    monkeypatch.setattr(cluster_key, "NEW_KEY", "false")
    with pytest.raises(ConfigurationError, match="exit status 1"):
        new_key()


def test_settings_leave_no_open_file_behind() -> None:
    before = len(os.listdir("/proc/self/fd"))
    for _ in range(3):
        tls_context(KEY, ssl.PROTOCOL_TLS_CLIENT)
    assert len(os.listdir("/proc/self/fd")) == before


def handshake(client: ssl.SSLContext, server: ssl.SSLContext) -> None:
    """A handshake in memory, and one byte each way. Raises SSLError."""
    to_server, to_client = ssl.MemoryBIO(), ssl.MemoryBIO()
    ends = [
        server.wrap_bio(to_server, to_client, server_side=True),
        client.wrap_bio(to_client, to_server, server_hostname="any"),
    ]
    for _ in range(4):
        for end in ends:
            try:
                end.do_handshake()
            except ssl.SSLWantReadError:
                continue
    for end, other in (ends, ends[::-1]):
        end.write(b"x")
        assert other.read(1) == b"x"


SERVER = tls_context(KEY, ssl.PROTOCOL_TLS_SERVER)
CLIENT = tls_context(KEY, ssl.PROTOCOL_TLS_CLIENT)


def test_two_ends_with_one_key_accept_each_other() -> None:
    handshake(CLIENT, SERVER)


def test_ends_with_different_keys_refuse_each_other() -> None:
    with pytest.raises(ssl.SSLError) as caught:
        handshake(tls_context(OTHER_KEY, ssl.PROTOCOL_TLS_CLIENT), SERVER)
    assert "does not have the cluster's key" in refusal(caught.value)


@pytest.mark.parametrize("presented", [None, OTHER_KEY], ids=["none", "another"])
def test_a_client_that_checks_nothing_still_has_to_prove_that_it_has_the_key(
    presented: bytes | None, tmp_path: Path
) -> None:
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    stranger.check_hostname, stranger.verify_mode = False, ssl.CERT_NONE
    if presented is not None:
        (tmp_path / "key").write_bytes(presented)
        stranger.load_cert_chain(tmp_path / "key")
    with pytest.raises(ssl.SSLError) as caught:
        handshake(stranger, SERVER)
    assert "does not have the cluster's key" in refusal(caught.value)


def test_a_server_without_the_key_is_refused(tmp_path: Path) -> None:
    (tmp_path / "key").write_bytes(OTHER_KEY)
    stranger = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    stranger.load_cert_chain(tmp_path / "key")
    with pytest.raises(ssl.SSLError) as caught:
        handshake(CLIENT, stranger)
    assert "does not have the cluster's key" in refusal(caught.value)


def test_older_versions_of_tls_are_refused() -> None:
    older = tls_context(KEY, ssl.PROTOCOL_TLS_CLIENT)
    older.minimum_version = older.maximum_version = ssl.TLSVersion.TLSv1_2
    with pytest.raises(ssl.SSLError) as caught:
        handshake(older, SERVER)
    assert "does not speak TLS 1.3" in refusal(caught.value)
