"""Which options of a fleet go together."""

import pytest

from quire.errors import ConfigurationError
from quire.server.config import ServerConfig
from quire.server.fleet_launch import check_fleet


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"replicas": 2, "max_replicas": 1}, "max_replicas is 1, below replicas"),
        ({"agents": ("a:1",), "max_replicas": 2}, "max_replicas is set"),
        ({"agents": ("a:1",), "replicas": 2}, "leave replicas out"),
        ({"agents": ("a:1",), "ray_address": "auto"}, "leave agents out, or use quire serve"),
        ({"agents": ("a:1",)}, "no cluster_key_file"),
        ({"cluster_key_file": "key"}, "cluster_key_file is 'key', but changes nothing"),
        ({"replicas": 2, "link_heartbeat_s": 9.0}, "link_heartbeat_s is 9.0, but"),
        ({"replicas": 2, "replica_gpus": 1.0}, "replica_gpus is 1.0, but"),
        ({"replicas": 2, "scale_wait_s": 3.0}, "scale_wait_s is 3.0, but"),
        ({"routing_policy": "least_work"}, "routing_policy is 'least_work', but"),
        (
            {"models_memory": 1 << 30},
            "models_memory is 1073741824, but changes nothing",
        ),
        ({"models_keep_processes": True}, "models_keep_processes is True, but changes nothing"),
        ({"models_wait_s": 5.0}, "models_wait_s is 5.0, but changes nothing without models"),
    ],
)
def test_options_that_dont_go_together_are_refused_by_name(given, says) -> None:
    with pytest.raises(ConfigurationError, match=says):
        check_fleet(ServerConfig(**given))


@pytest.mark.parametrize(
    "given",
    [
        {},
        {"replicas": 2, "routing_policy": "least_work"},
        {"max_replicas": 2, "scale_wait_s": 3.0, "routing_policy": "least_work"},
        {"agents": ("a:1",), "cluster_key_file": "key", "link_heartbeat_s": 9.0},
        {"models_file": "models.yaml", "models_memory": 1 << 30, "models_wait_s": 5.0},
        {"ray_address": "auto", "replica_gpus": 1.0, "replica_cpus": 2.0},
    ],
)
def test_options_that_do_are_taken(given) -> None:
    check_fleet(ServerConfig(**given))
