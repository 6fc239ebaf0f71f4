"""What handlers share: the model's name, and whether calls are taken."""

import pytest

from quire.errors import ServerDrainingError
from quire.server.service import Service, UnknownModelError


def make(name="mine"):
    return Service(None, None, None, name)


def test_only_the_served_model_is_known_and_it_may_be_left_out():
    make().check_model("mine")
    make().check_model(None)
    make().check_model("dummy")  # what huggingface_hub sends then
    assert make().answered_name("dummy") == make().answered_name(None) == "mine"
    with pytest.raises(UnknownModelError, match="'other' is not served here") as caught:
        make().check_model("other")
    assert (caught.value.http_status, caught.value.param) == (404, "model")


def test_a_server_that_ends_accepts_nothing_more():
    service = make()
    service.check_accepting()
    assert not service.drain.is_on
    for _ in range(2):
        service.drain.begin()
        assert service.drain.is_on
        with pytest.raises(ServerDrainingError, match="takes no new calls") as caught:
            service.check_accepting()
    assert caught.value.http_status == 503
    assert caught.value.retry_after_s >= 1


def test_a_service_of_its_own_has_the_usual_bounds():
    first, second = make(), make()
    assert first.limits == second.limits
    assert first.tenants is not second.tenants
    assert first.monitor is not second.monitor
    assert first.drain is not second.drain
