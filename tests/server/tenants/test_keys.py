"""Keys open the server for their tenants, are never shown, and can be changed while it runs."""

import logging
import os

import pytest

from quire.errors import ConfigurationError
from quire.server.tenants import keys as keys_module
from quire.server.tenants.keys import MAX_FILE_BYTES, MAX_KEYS, ApiKeys, load_keys
from quire.server.tenants.tenants import Tenant

ALICE, BOB, UNNAMED = "alice-key-1", "bob-key-1", "key-without-a-name"


class Clock:
    now_s = 0.0

    def __call__(self):
        return self.now_s


def name_of(keys, *presented):
    tenant = keys.tenant_of([key.encode() for key in presented])
    return None if tenant is None else tenant.name


def test_a_key_is_its_tenants_and_no_other_opens():
    keys = ApiKeys([f"alice:{ALICE}", f"bob:{BOB}"])
    assert name_of(keys, ALICE) == "alice" and name_of(keys, BOB) == "bob"
    wrong = ["", ALICE[:-1], f"{ALICE}x", ALICE.upper(), f"alice:{ALICE}", "alice", BOB[::-1]]
    assert [name_of(keys, key) for key in wrong] == [None] * len(wrong)
    assert name_of(keys) is None
    assert name_of(keys, "wrong-key", BOB) == "bob"


def test_two_keys_with_one_name_are_one_tenant():
    keys = ApiKeys([f"alice:{ALICE}", "alice:alice-key-2", f"alice:{ALICE}"])
    assert keys.tenants == {Tenant("alice")}
    assert name_of(keys, ALICE) == name_of(keys, "alice-key-2") == "alice"


def test_a_key_without_a_name_gets_one_that_is_always_the_same_and_tells_nothing():
    name, again = (name_of(ApiKeys([UNNAMED]), UNNAMED) for _ in range(2))
    other = name_of(ApiKeys(["another-key"]), "another-key")
    assert name == again != other
    assert name.startswith("key-") and UNNAMED not in name


def test_a_setting_behind_one_key_is_its_tenants():
    keys = ApiKeys(
        [f"alice:{ALICE}  speculation_history=false ", "alice:alice-key-2", f"bob:{BOB}"]
    )
    shares = {tenant.name: tenant.speculation_history for tenant in keys.tenants}
    assert shares == {"alice": False, "bob": True}
    for key in (ALICE, "alice-key-2"):
        assert keys.tenant_of([key.encode()]).speculation_history is False


def test_a_tenant_may_be_limited_to_models_beside_another_setting():
    keys = ApiKeys(
        [
            f"alice:{ALICE} models=chat,embed speculation_history=false",
            "alice:alice-key-2",
            f"bob:{BOB}",
        ]
    )
    for key in (ALICE, "alice-key-2"):
        tenant = keys.tenant_of([key.encode()])
        assert tenant.models == {"chat", "embed"}
        assert (tenant.may_use(["gpt", "chat"]), tenant.may_use(["code"])) == (True, False)
        assert tenant.speculation_history is False
    assert keys.tenant_of([BOB.encode()]).may_use(["code"])
    with pytest.raises(ConfigurationError, match="'alice' has two settings models=, which differ"):
        ApiKeys([f"alice:{ALICE} models=chat", "alice:alice-key-2 models=embed"])


def test_a_key_may_have_colons_after_its_name():
    assert name_of(ApiKeys(["alice:a:b:c:d:e:f"]), "a:b:c:d:e:f") == "alice"


@pytest.mark.parametrize(
    ("entry", "reason"),
    [
        ("", "the key has 0 characters, but must have 8 to 512"),
        ("short", "has 5 characters"),
        ("alice:", "has 0 characters"),
        ("alice:" + "x" * 513, "has 513 characters"),
        (":secret-key-1", "is no name"),
        ("al ice:secret-key-1", "names and keys have no spaces"),
        ("al/ice:secret-key-1", "is no name"),
        ("a" * 65 + ":secret-key-1", "is no name"),
        ("alice:secret key 1", "names and keys have no spaces"),
        ("alice:secret-key-1 speculation_history=0", "not the setting speculation_history=false"),
        ("speculation_history=false", "is a setting, not a key"),
        ("models=chat", "is a setting, not a key"),
        ("alice:secret-key-1 models=", "not the setting speculation_history=false or models=NAME"),
        ("alice:secret-kéy-1", "can't be in a header"),
        ("alice:secret-key\x7f", "can't be in a header"),
    ],
)
def test_invalid_keys_are_refused_without_showing_them(entry, reason):
    with pytest.raises(ConfigurationError, match="API key 2:") as caught:
        ApiKeys([f"bob:{BOB}", entry])
    assert reason in str(caught.value)
    assert "secret" not in str(caught.value) and "short" not in str(caught.value)


def test_one_key_is_of_one_tenant():
    with pytest.raises(ConfigurationError, match="the key belongs to 'alice' already") as caught:
        ApiKeys([f"alice:{ALICE}", f"bob:{ALICE}"])
    assert ALICE not in str(caught.value)


def test_the_number_of_keys_is_bounded():
    with pytest.raises(ConfigurationError, match=f"{MAX_KEYS + 1} API keys"):
        ApiKeys([f"key-number-{n}" for n in range(MAX_KEYS + 1)])


def test_keys_are_kept_as_digests_that_no_other_process_shares():
    keys, others = ApiKeys([f"alice:{ALICE}"]), ApiKeys([f"alice:{ALICE}"])
    assert ALICE not in repr(vars(keys))
    assert set(keys._all).isdisjoint(others._all)


@pytest.mark.parametrize("presented", ["key-number-0", "key-number-8", "no-key-at-all"])
def test_a_look_up_compares_with_every_key(monkeypatch, presented):
    keys = ApiKeys([f"key-number-{n}" for n in range(9)])
    compared = []
    compare = keys_module.hmac.compare_digest

    def counted(known, digest):
        compared.append((len(known), len(digest)))
        return compare(known, digest)

    monkeypatch.setattr(keys_module.hmac, "compare_digest", counted)
    keys.tenant_of([presented.encode()])
    assert compared == [(32, 32)] * 9


def test_without_any_option_there_are_no_keys(tmp_path):
    assert load_keys((), None) is None
    assert name_of(load_keys([f"alice:{ALICE}"], None), ALICE) == "alice"
    with pytest.raises(ConfigurationError, match="no API keys"):
        ApiKeys()
    file = tmp_path / "keys"
    file.write_text(f"alice:{ALICE}")
    assert name_of(load_keys((), str(file)), ALICE) == "alice"


class TestFile:
    """A file of keys, and a clock that only the test moves."""

    @pytest.fixture
    def clock(self):
        return Clock()

    @pytest.fixture
    def file(self, tmp_path):
        file = tmp_path / "keys.txt"
        file.touch(0o600)
        return file

    def test_a_file_that_every_user_may_read_is_warned_of_once(self, file, clock, caplog):
        file.write_text(f"alice:{ALICE}")
        file.chmod(0o640)
        keys = ApiKeys((), file, clock=clock)
        readable, writable = "may read the file of API keys", "may write the file of API keys"
        found = []
        for mode in (0o600, 0o644, 0o644, 0o640, 0o602):
            file.chmod(mode)
            clock.now_s += 1
            assert name_of(keys, ALICE) == "alice"
            found.append(caplog.text)
            caplog.clear()
        for text, expected in zip(found, (None, readable, None, None, writable), strict=True):
            assert (expected in text and ALICE not in text) if expected else not text

    def test_one_key_a_line_with_comments(self, file):
        file.write_text(f"# who may call\n\n  alice:{ALICE}  \r\n{UNNAMED}\n# old: bob:bob-key-0\n")
        keys = ApiKeys([f"bob:{BOB}"], file)
        assert name_of(keys, ALICE) == "alice" and name_of(keys, BOB) == "bob"
        assert name_of(keys, UNNAMED) is not None
        assert name_of(keys, "bob-key-0") is None

    def test_a_setting_in_the_file_comes_and_goes_with_its_line(self, file, clock):
        file.write_text("alice:alice-key-2 speculation_history=false")
        keys = ApiKeys([f"alice:{ALICE}"], file, clock=clock)
        assert keys.tenant_of([ALICE.encode()]).speculation_history is False
        assert keys.tenant_named("alice").speculation_history is False
        assert keys.tenant_named("nobody") is None
        file.write_text("alice:alice-key-2")
        clock.now_s = 1.0
        assert keys.tenant_of([ALICE.encode()]).speculation_history is True

    def test_a_change_is_seen_after_a_second_at_most(self, file, clock):
        file.write_text(f"alice:{ALICE}\nbob:{BOB}")
        keys = ApiKeys((), file, clock=clock)
        file.write_text("alice:alice-key-2\n")
        clock.now_s = 0.9
        assert name_of(keys, ALICE) == "alice" and name_of(keys, "alice-key-2") is None
        clock.now_s = 1.0
        assert name_of(keys, "alice-key-2") == "alice"
        assert name_of(keys, ALICE) is None and name_of(keys, BOB) is None

    def test_a_change_of_equal_length_and_time_is_seen_too(self, file, clock):
        file.write_text("alice:alice-key-1")
        keys = ApiKeys((), file, clock=clock)
        before = file.stat()
        file.write_text("alice:alice-key-2")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
        clock.now_s = 1.0
        assert name_of(keys, "alice-key-2") == "alice"

    def test_it_is_looked_at_once_a_second_however_many_call(self, file, clock, monkeypatch):
        file.write_text(f"alice:{ALICE}")
        keys = ApiKeys((), file, clock=clock)
        reads = []
        read = keys_module._read_text
        monkeypatch.setattr(keys_module, "_read_text", lambda f: reads.append(f) or read(f))
        for tenths in range(35):
            clock.now_s = tenths / 10
            assert name_of(keys, ALICE) == "alice"
        assert len(reads) == 3

    @pytest.mark.parametrize(
        ("content", "reason"),
        [
            (b"alice:short", "line 1 of .* has 5 characters"),
            (b"# fine\nbob:bob-key-2\nal/ice:secret-key-1\n", "line 3 of .* is no name"),
            (b"alice:alice-key-2\nbob:alice-key-2", "line 2 .* the key belongs to 'alice' already"),
            (b"\xff\xfe\x00", "is not UTF-8"),
            (b"# nothing left\n", "has no key"),
            (b"", "has no key"),
            (b"#" * (MAX_FILE_BYTES + 1), f"is above {MAX_FILE_BYTES} bytes"),
            (None, "can't be read: No such file"),
        ],
    )
    def test_a_broken_file_changes_nothing_and_is_told_once(
        self, file, clock, caplog, content, reason
    ):
        file.write_text(f"alice:{ALICE}")
        keys = ApiKeys((), file, clock=clock)
        if content is None:
            file.unlink()
        else:
            file.write_bytes(content)
        with caplog.at_level(logging.INFO, "quire"):
            for _ in range(3):
                clock.now_s += 1
                assert name_of(keys, ALICE) == "alice"
                assert name_of(keys, "bob-key-2") is None
        (record,) = caplog.records
        assert record.levelno == logging.ERROR
        assert "stay in force" in record.getMessage() and "secret" not in record.getMessage()
        with pytest.raises(ConfigurationError, match=reason):  # at the start it ends the server
            ApiKeys((), file)

    def test_once_it_is_mended_it_counts_again(self, file, clock, caplog):
        file.write_text(f"alice:{ALICE}")
        keys = ApiKeys((), file, clock=clock)
        with caplog.at_level(logging.ERROR, "quire"):
            for content in ("oops", f"alice:{ALICE}", "oops", f"bob:{BOB}"):
                file.write_text(content)
                clock.now_s += 1
                name_of(keys, "anything")
        assert len(caplog.records) == 2
        assert name_of(keys, BOB) == "bob" and name_of(keys, ALICE) is None

    def test_keys_of_the_command_line_stay_when_the_file_is_emptied(self, file, clock):
        file.write_text(f"alice:{ALICE}")
        keys = ApiKeys([f"bob:{BOB}"], file, clock=clock)
        file.write_text("")
        clock.now_s = 1.0
        assert name_of(keys, ALICE) is None and name_of(keys, BOB) == "bob"

    def test_a_folder_or_a_pipe_is_refused(self, tmp_path):
        with pytest.raises(ConfigurationError, match="is not a regular file"):
            ApiKeys((), tmp_path)
