"""The server's options: bounds, and that each fault names its field."""

import pytest

from quire.errors import ConfigurationError
from quire.observability.log import FORMATS, LEVELS
from quire.server.config import LOG_FORMATS, LOG_LEVELS, ServerConfig
from quire.server.http.guard import AccessConfig
from quire.server.limits import CallLimits


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("port", -1),
        ("port", 65536),
        ("drain_timeout_s", 0),
        ("max_queued_requests", 0),
        ("max_tenant_requests", 0),
        ("max_tenant_tokens_per_minute", -5),
        ("max_body_bytes", 0),
        ("max_prompts", 0),
        ("max_n", 0),
        ("max_choices", 0),
        ("max_stop_strings", 0),
        ("max_list_length", 0),
        ("default_deadline_s", 0),
        ("heartbeat_timeout_s", -1),
        ("keep_alive_s", 0),
        ("max_engine_restarts", -1),
    ],
)
def test_a_number_out_of_bounds_is_refused_by_name(field, value):
    with pytest.raises(ConfigurationError, match=f"{field} is {value}"):
        ServerConfig(**{field: value})


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_seconds_are_finite(value):
    with pytest.raises(ConfigurationError, match="keep_alive_s is"):
        ServerConfig(keep_alive_s=value)


@pytest.mark.parametrize("field", ["log_format", "log_level"])
def test_a_name_that_is_unknown_is_refused(field):
    with pytest.raises(ConfigurationError, match=f"{field} is 'loud', but must be one of"):
        ServerConfig(**{field: "loud"})


def test_log_options_accept_the_logs_own_names():
    assert (LOG_LEVELS, LOG_FORMATS) == (LEVELS, FORMATS)


def test_no_bound_and_no_restart_may_be_asked_for():
    server = ServerConfig(max_tenant_requests=None, max_engine_restarts=0, port=0)
    assert (server.max_tenant_requests, server.max_engine_restarts) == (None, 0)


def test_server_defaults_equal_those_of_its_parts():
    server, limits = ServerConfig(), CallLimits()
    for name in ("max_prompts", "max_n", "max_choices", "max_stop_strings", "max_list_length"):
        assert getattr(server, name) == getattr(limits, name)
    assert server.max_body_bytes == AccessConfig().max_body_bytes


def test_no_key_is_shown():
    assert "secret" not in repr(ServerConfig(api_keys=("alice:secret-key",)))
