"""Key file of a cluster, and the TLS settings that are made from it.

The file has a private key and its own certificate in PEM. Both ends of a connection present this
certificate and accept no other. So each end proves that it has the private key, and TLS encrypts
all messages. OpenSSL ignores the certificate's names and dates under these settings. Used by
`engine_slots`, `agent` and `ray_agents`.
"""

import os
import ssl
import stat
import subprocess
from pathlib import Path

from quire.cluster.machines.agent_arguments import NEW_KEY
from quire.errors import ConfigurationError
from quire.observability.log import get_logger

_NO_CHECK_TIME = 0x200000  # OpenSSL's X509_V_FLAG_NO_CHECK_TIME, which Python's ssl does not name

logger = get_logger(__name__)


def read_key(path: Path) -> bytes:
    """Read the key of the cluster from its file. Raises ConfigurationError."""
    try:
        key = path.read_bytes()
        mode = stat.S_IMODE(path.stat().st_mode)
    except OSError as error:
        raise ConfigurationError(f"the cluster's key can't be read: {error}") from error
    try:
        tls_context(key, ssl.PROTOCOL_TLS_SERVER)
    except (ssl.SSLError, ValueError) as error:
        raise ConfigurationError(
            f"the cluster's key in {path} must be a private key and its certificate in PEM, since"
            f" connections to agents use TLS; make one with: {NEW_KEY} -keyout {path} -out {path}"
        ) from error
    if mode & (stat.S_IRGRP | stat.S_IROTH):
        logger.warning(
            "%s has mode %03o, so others can read the cluster's key, which lets them start engines:"
            " give it mode 600",
            *(path, mode),
        )
    return key


def new_key() -> bytes:
    """Make a key. Raises ConfigurationError if the command `openssl` is missing or fails."""
    command = [*NEW_KEY.split(), "-keyout", "/dev/stdout", "-out", "/dev/stdout"]
    try:
        return subprocess.run(command, capture_output=True, check=True).stdout
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigurationError(
            f"the key of the cluster can't be made: {error}; install openssl, or make the key"
            " elsewhere and name it in cluster_key_file"
        ) from error


def tls_context(key: bytes, protocol: "ssl._SSLMethod") -> ssl.SSLContext:
    """TLS settings for one end: `protocol` is PROTOCOL_TLS_SERVER for the agent, and
    PROTOCOL_TLS_CLIENT for the API server. Raises SSLError or ValueError for an unusable key."""
    context = ssl.SSLContext(protocol)
    context.minimum_version = ssl.TLSVersion.TLSv1_3
    context.check_hostname = False
    context.verify_mode = ssl.CERT_REQUIRED
    context.verify_flags = ssl.VerifyFlags(ssl.VERIFY_X509_PARTIAL_CHAIN | _NO_CHECK_TIME)
    context.load_verify_locations(cadata=key.decode("ascii"))
    # Python loads private keys from files only; this one is in memory.
    with open(os.memfd_create("quire-key"), "wb", buffering=0) as file:
        file.write(key)
        context.load_cert_chain(f"/proc/self/fd/{file.fileno()}", password="")
    return context


def refusal(error: ssl.SSLError) -> str:
    """Why a TLS handshake has failed, for people."""
    reason = error.reason or "no reason given"
    if "CERT" in reason or "UNKNOWN_CA" in reason:
        return f"the other end does not have the cluster's key ({reason})"
    return f"the other end does not speak TLS 1.3, or is another version of quire ({reason})"
