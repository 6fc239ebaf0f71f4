"""The API key of a request names its tenant, without betraying the key."""

from fastapi import Request as HTTPRequest

from quire.server.tenancy import options_of, tenant_of


def request(key: str | None) -> HTTPRequest:
    headers = [] if key is None else [(b"authorization", f"Bearer {key}".encode())]
    return HTTPRequest({"type": "http", "headers": headers})


def test_a_key_names_a_tenant_and_is_not_in_the_name() -> None:
    names = [tenant_of(request(key)) for key in ("secret-a", "secret-b", "secret-a", None)]
    assert names[0] == names[2] != names[1]
    assert names[3] == ""
    assert not any("secret" in name for name in names)


def test_a_salt_parts_the_requests_of_one_key() -> None:
    salted, plain = options_of(request("k"), 2, "salt"), options_of(request("k"), 0, None)
    assert salted.priority == 2 and salted.tenant == plain.tenant
    assert salted.cache_domain != plain.cache_domain
