"""How a model that was found is named for another process."""

from pathlib import Path

from quire.hub.found_model import FoundModel


def test_what_is_whole_is_named_by_its_folder_and_the_rest_by_its_commit():
    assert FoundModel(Path("/m")).named_for_others("m") == ("/m", None)
    assert FoundModel(Path("/c/s/abc"), False, "abc").named_for_others("o/m") == ("o/m", "abc")
