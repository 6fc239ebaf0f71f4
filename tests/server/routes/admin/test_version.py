"""/version says which quire it is."""

from quire.version import __version__


def test_the_version_is_printed(http):
    answer = http.get("/version")
    assert (answer.status_code, answer.json()) == (200, {"version": __version__})
