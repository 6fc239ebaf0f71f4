"""Models that can't be served together are refused by name, and the memory of each is computed."""

import asyncio
from types import SimpleNamespace

import numpy as np
import pytest
from safetensors.numpy import save_file
from tests.images.tiny_folders import write_smolvlm

from quire.errors import ConfigurationError
from quire.hub.model_folder import EMBEDDED_MODEL
from quire.observability.machine_memory import total_memory_bytes
from quire.server.config import ServerConfig
from quire.server.hosted_model import HostedModel
from quire.server.listed_model import ListedModel
from quire.server.model_loader import LEAST_KV_BYTES, EngineLoader, RoomIdleUnload, check_models
from quire.server.service import SharedState

MIB = 1 << 20


def entry(name="a", *, aliases=(), memory=None, is_pinned=False, server=None, **engine):
    options = {"device": "cpu"} | engine
    return ListedModel((name, *aliases), options, server or {}, memory, is_pinned)


@pytest.mark.parametrize(
    ("entries", "server", "reason"),
    [
        ([entry(), entry("b")], {}, None),
        ([entry(), entry()], {}, "two models, or their adapters, are called 'a'"),
        ([entry(), entry("b", aliases=["a"])], {}, "are called 'a'"),
        ([entry(memory=MIB, num_blocks=4)], {}, "'a' has memory and num_blocks"),
        ([entry(is_pinned=True, server={"idle_unload_s": 9.0})], {}, "'a' is pinned, so"),
        ([entry(max_num_seqs=0)], {}, "max_num_seqs is 0"),
        ([entry(device="cuda")], {}, "'a' may use a GPU; give models_memory"),
        (
            [entry(server={"routing_policy": "least_work"})],
            {},
            "routing_policy is 'least_work', but",
        ),
        ([entry()], {"agents": ("h:1",)}, "agents is set, but several models run on this machine"),
        ([entry()], {"record": "file"}, "record is set, but a recording is of one model"),
        ([entry()], {"max_replicas": 2}, "max_replicas is set, but"),
        ([entry()], {"served_model_name": ("x",)}, "served_model_name is set, but"),
    ],
)
def test_models_that_cannot_be_served_together_are_refused(entries, server, reason):
    if reason is None:
        check_models(entries, ServerConfig(**server))
        return
    with pytest.raises(ConfigurationError, match=reason):
        check_models(entries, ServerConfig(**server))


def prepared(given, **server):
    loader = EngineLoader(given, ServerConfig(**server), SharedState(), None)
    needed = asyncio.run(loader.prepare())
    plan = loader._plan
    plan.files.grammars.close()
    return needed, plan


def test_memory_is_that_of_the_entry_or_weights_and_a_cache():
    weights = sum(file.stat().st_size for file in EMBEDDED_MODEL.glob("*.safetensors"))
    needed, plan = prepared(entry())
    assert needed == weights + LEAST_KV_BYTES
    share = plan.options.gpu_memory_utilization
    assert share * total_memory_bytes() == pytest.approx(needed)
    needed, plan = prepared(entry(memory=64 * MIB))
    assert needed == 64 * MIB
    assert plan.options.gpu_memory_utilization * total_memory_bytes() == pytest.approx(64 * MIB)
    needed, plan = prepared(entry(kv_cache_memory=8 * MIB))
    assert needed == weights + 8 * MIB
    assert plan.options.gpu_memory_utilization is None
    assert prepared(entry(server={"replicas": 2}))[0] == 2 * (weights + LEAST_KV_BYTES)


def test_memory_includes_the_embeddings_of_images(tmp_path):
    folder = write_smolvlm(tmp_path / "tiny")
    save_file({"weight": np.zeros(8, np.float32)}, folder / "model.safetensors")
    weights = (folder / "model.safetensors").stat().st_size
    given = {"model": str(folder), "kv_cache_memory": 8 * MIB, "encoder_cache_memory": 2 * MIB}
    assert prepared(entry(**given))[0] == weights + 11 * MIB
    for options in ({"language_model_only": True}, {"model_impl": "transformers"}):
        assert prepared(entry(**given, **options))[0] == weights + 8 * MIB


def test_a_model_has_the_names_of_its_entry():
    _, plan = prepared(entry("x", aliases=["y"]))
    assert plan.model_names == ("x", "y")


def test_adapters_are_known_before_the_model_is_loaded():
    model = HostedModel(("a",), given_adapters=("sql",))
    assert model.all_names == ["a", "sql"]


def test_the_operators_time_for_a_model_ends_when_the_model_is_unloaded():
    async def main():
        unloaded, model = [], HostedModel(("a",))
        fleet = SimpleNamespace(sleeping=SimpleNamespace(last_request_s=0.0))
        room = SimpleNamespace(begin_unload=unloaded.append)
        idle = RoomIdleUnload(fleet, 300.0, room, model)
        idle.keep(0)
        assert idle.seconds_left == 0
        await idle._unload()
        assert unloaded == [model]
        assert idle.seconds_left > 200  # so the next call's model is not unloaded at once

    asyncio.run(main())
