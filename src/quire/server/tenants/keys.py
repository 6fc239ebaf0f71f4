"""The server's API keys, and the tenant that each key belongs to.

A key is written as "name:key", or as "key", which gets a name from its hash. Keys with the same
name belong to one tenant, so a tenant's key can be replaced without interruption. Behind a key and
a space may stand settings: "speculation_history=false", and "models=NAME,NAME". Keys come from the
command line and from a file, which is read again when it has changed. Made by `launch`, called by
`http.guard`.
"""

import hashlib
import hmac
import os
import re
import secrets
import stat
import time
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path

from quire.errors import ConfigurationError
from quire.observability.log import get_logger
from quire.server.tenants.tenants import Tenant

RELOAD_INTERVAL_S = 1.0
MIN_KEY_CHARACTERS = 8
MAX_KEY_CHARACTERS = 512
MAX_KEYS = 4096
"""Maximum number of keys. A look-up compares with each key, which takes about 0.1 us per key."""
MAX_FILE_BYTES = 1 << 20

WITHOUT_HISTORY = "speculation_history=false"
"""The setting of a tenant whose answers are not kept for drafts."""

MODELS = "models="
"""The beginning of the setting that names the models which a tenant may use, with commas."""

_NAME = re.compile(r"[A-Za-z0-9_.-]{1,64}")

logger = get_logger(__name__)

_Digests = dict[bytes, Tenant]


class ApiKeys:
    """All keys of a server. Finds the tenant that a key belongs to.

    Invariant: only digests of keys are stored, made with a secret of this process. A look-up
    compares with all of them in constant time, so its duration reveals nothing about a key.
    """

    def __init__(
        self,
        entries: Sequence[str] = (),
        file: Path | None = None,
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Raises ConfigurationError, which never contains a key, for an invalid key or file, and if
        there is no key at all."""
        self._secret = secrets.token_bytes(32)
        self._clock = clock
        self._file = file
        self._fixed = self._digests_of((f"API key {i + 1}", e) for i, e in enumerate(entries))
        self._all = self._fixed
        self._seen = b""
        self._complaint = ""
        self._is_exposed = False
        self._next_look_s = clock() + RELOAD_INTERVAL_S
        if file is not None:
            self._read(file)
        elif not entries:
            raise ConfigurationError("there are no API keys, and no file to read them from")

    @property
    def tenants(self) -> set[Tenant]:
        return set(self._all.values())

    def tenant_of(self, presented: Iterable[bytes]) -> Tenant | None:
        """The tenant of the first valid key among `presented`; None if no key is valid."""
        self._reload_file()
        for key in presented:
            digest, found = self._digest(key), None
            for known, tenant in self._all.items():
                if hmac.compare_digest(known, digest):
                    found = tenant
            if found is not None:
                return found
        return None

    def tenant_named(self, name: str) -> Tenant | None:
        """Find the tenant of a name. Returns None if the server has no key of that name now."""
        self._reload_file()
        return next((tenant for tenant in self._all.values() if tenant.name == name), None)

    def _reload_file(self) -> None:
        """Read the file again, at most once a second. A file that can't be read changes nothing.

        Compares the content, not the modification time, since two writes within one tick of the
        kernel's clock have the same modification time.
        """
        now_s = self._clock()
        if self._file is None or now_s < self._next_look_s:
            return
        self._next_look_s = now_s + RELOAD_INTERVAL_S
        try:
            has_changed = self._read(self._file)
        except ConfigurationError as error:
            if str(error) != self._complaint:  # log it once, not every second
                self._complaint = str(error)
                logger.error("%s; the keys that were read before stay in force", error)
            return
        self._complaint = ""
        if has_changed:
            logger.info("read the API keys again: %d tenants now", len(self.tenants))

    def _read(self, file: Path) -> bool:
        """Read the keys of the file; returns whether it had changed. Raises ConfigurationError."""
        text, mode = _read_text(file)
        self._check_mode(file, mode)
        seen = self._digest(text.encode())
        if seen == self._seen:
            return False
        lines = ((number, line.strip()) for number, line in enumerate(text.splitlines(), 1))
        entries = [(f"line {n} of {file}", line) for n, line in lines if line and line[0] != "#"]
        if not entries and not self._fixed:
            raise ConfigurationError(f"the file of API keys, {file}, has no key")
        self._all = self._digests_of(entries, self._fixed)
        self._seen = seen
        return True

    def _check_mode(self, file: Path, mode: int) -> None:
        """Warn, once, if every user of the machine may read or write the file."""
        is_exposed = bool(mode & (stat.S_IROTH | stat.S_IWOTH))
        if is_exposed and not self._is_exposed:
            may = "write" if mode & stat.S_IWOTH else "read"
            logger.warning(
                "every user of this machine may %s the file of API keys, %s (its mode is %04o);"
                " take that right away: chmod o-rwx %s",
                may,
                file,
                stat.S_IMODE(mode),
                file,
            )
        self._is_exposed = is_exposed

    def _digests_of(
        self, entries: Iterable[tuple[str, str]], others: _Digests | None = None
    ) -> _Digests:
        """The digests of `others` and of `entries`. An entry has the place of a key, for errors,
        and the key with its name and setting.

        A setting of one key holds for its tenant, whatever key a call has.
        """
        found = dict(others or {})
        without_history = {each.name for each in found.values() if not each.speculation_history}
        models = {each.name: each.models for each in found.values() if each.models is not None}
        for where, entry in entries:
            name, key, settings = _parse(where, entry)
            tenant = Tenant(name or _name_of(key))
            if WITHOUT_HISTORY in settings:
                without_history.add(tenant.name)
            for given in filter(None, map(_models_in, settings)):
                if models.setdefault(tenant.name, given) != given:
                    raise ConfigurationError(
                        f"{where}: the tenant {tenant.name!r} has two settings {MODELS}, which"
                        " differ; give one of them"
                    )
            known = found.setdefault(self._digest(key.encode()), tenant)
            if known != tenant:
                raise ConfigurationError(
                    f"{where}: the key belongs to {known.name!r} already, and opens one tenant "
                    f"only; give {tenant.name!r} another"
                )
        if len(found) > MAX_KEYS:
            raise ConfigurationError(f"there are {len(found)} API keys, above {MAX_KEYS}")
        return {
            digest: Tenant(
                tenant.name,
                speculation_history=tenant.name not in without_history,
                models=models.get(tenant.name),
            )
            for digest, tenant in found.items()
        }

    def _digest(self, key: bytes) -> bytes:
        return hashlib.blake2b(key, key=self._secret, digest_size=32).digest()


def load_keys(entries: Sequence[str], file: str | None) -> ApiKeys | None:
    """The keys in the server's options; None means that calls need no key. Raises
    ConfigurationError."""
    if not entries and file is None:
        return None
    return ApiKeys(entries, None if file is None else Path(file))


def _models_in(setting: str) -> frozenset[str]:
    """The names of models in a setting; empty for another setting."""
    names = setting.removeprefix(MODELS).split(",") if setting.startswith(MODELS) else ()
    return frozenset(filter(None, names))


def _parse(where: str, entry: str) -> tuple[str, str, list[str]]:
    """Split an entry into name, key and settings. A missing name is "".

    Raises ConfigurationError, which does not contain the key.
    """
    entry, space, rest = entry.partition(" ")
    settings = rest.split()
    if (space and not settings) or not all(map(_is_setting, settings)):
        raise ConfigurationError(
            f"{where}: names and keys have no spaces, and what stands behind the first space is "
            f"not the setting {WITHOUT_HISTORY} or {MODELS}NAME,NAME"
        )
    if _is_setting(entry):
        raise ConfigurationError(
            f"{where}: {entry.partition('=')[0]} is a setting, not a key; write it in the same line"
            " as a key, behind a space, in the file of API keys or in --api-key"
        )
    first, colon, rest = entry.partition(":")
    name, key = (first, rest) if colon else ("", first)
    if colon and not _NAME.fullmatch(name):
        raise ConfigurationError(
            f"{where}: what stands before the first colon is no name; names have 1 to 64 of A-Z, "
            "a-z, 0-9, '_', '.' and '-', as in alice:KEY"
        )
    if not MIN_KEY_CHARACTERS <= len(key) <= MAX_KEY_CHARACTERS:
        raise ConfigurationError(
            f"{where}: the key has {len(key)} characters, but must have {MIN_KEY_CHARACTERS} to "
            f"{MAX_KEY_CHARACTERS}; 32 random ones are a good choice"
        )
    if not (key.isascii() and key.isprintable()):
        raise ConfigurationError(
            f"{where}: the key has a character that can't be in a header; use printable ASCII "
            "without spaces"
        )
    return name, key, settings


def _is_setting(text: str) -> bool:
    return text == WITHOUT_HISTORY or bool(_models_in(text))


def _name_of(key: str) -> str:
    """A name for a key without a name. It must be equal after every start, since it determines the
    cache domain."""
    digest = hashlib.blake2b(key.encode(), digest_size=6, person=b"quire-key-name")
    return f"key-{digest.hexdigest()}"


def _read_text(file: Path) -> tuple[str, int]:
    """The file's text and its mode. Raises ConfigurationError."""
    try:
        # Opening a pipe would wait for its writer, and a pipe can't be read a second time.
        if not stat.S_ISREG(file.stat().st_mode):
            raise ConfigurationError(f"the file of API keys, {file}, is not a regular file")
        with file.open("rb") as opened:
            content = opened.read(MAX_FILE_BYTES + 1)
            mode = os.fstat(opened.fileno()).st_mode
    except OSError as error:
        raise ConfigurationError(
            f"the file of API keys, {file}, can't be read: {error.strerror}"
        ) from error
    if len(content) > MAX_FILE_BYTES:
        raise ConfigurationError(f"the file of API keys, {file}, is above {MAX_FILE_BYTES} bytes")
    try:
        return content.decode(), mode
    except UnicodeDecodeError as error:
        raise ConfigurationError(f"the file of API keys, {file}, is not UTF-8 text") from error
