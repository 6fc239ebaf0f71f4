"""Every option of the server.

The options are flat, since operators write them as flags or in a YAML file. `launch` converts them
to the configurations of the components.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, ClassVar

from quire.cluster.machines import DEFAULT_HEARTBEAT_S
from quire.errors import ConfigurationError
from quire.option_fields import (
    Bytes,
    Flag,
    JsonObject,
    Kind,
    OneOf,
    Options,
    Seconds,
    Switch,
    Text,
    Texts,
    Whole,
    option,
)
from quire.routing.find import DEFAULT_ROUTING_POLICY, ROUTING_POLICIES

MAX_QUEUED_REQUESTS = 1024
KEEP_ALIVE_S = 10.0
LOG_FORMATS = ("text", "json")
UNKNOWN_FIELDS = ("refuse", "ignore")
LOG_LEVELS = ("debug", "info", "warning", "error")

_NO_BOUND = Flag(shown="no bound")


@dataclass(frozen=True, slots=True)
class Port(Whole):
    """A port to listen on; 0 means any free port."""

    metavar: ClassVar[str | None] = "PORT"

    def validate(self, name: str, value: Any, *, is_optional: bool) -> int:
        if not isinstance(value, int) or isinstance(value, bool) or not 0 <= value < 1 << 16:
            raise ConfigurationError(f"{name} is {value}, but must be from 0 (any) to 65535")
        return value


@dataclass(frozen=True, slots=True)
class Restarts(Whole):
    """A number of restarts; 0 means never."""

    def validate(self, name: str, value: Any, *, is_optional: bool) -> int:
        if isinstance(value, int) and value < 0:
            raise ConfigurationError(f"{name} is {value}, but must be 0 (never) or more")
        return Whole.validate(self, name, value, is_optional=is_optional)


@dataclass(frozen=True, slots=True)
class Amount(Kind):
    """A number above 0, such as 0.5."""

    metavar: ClassVar[str | None] = "N"
    number: ClassVar[type[int] | type[float] | None] = float

    def validate(self, name: str, value: Any, *, is_optional: bool) -> float:
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not 0 < value < 1e6:
            raise ConfigurationError(f"{name} is {value!r:.80}, but must be a number above 0")
        return value


@dataclass(frozen=True, kw_only=True)
class ServerConfig(Options):
    """The server's options: address, model names, access, limits, fleet, logging and recording."""

    host: str = option(
        "127.0.0.1",
        Text(),
        group="server",
        help="address to listen on",
        flag=Flag(metavar="HOST"),
    )
    port: int = option(8000, Port(), group="server", help="port to listen on; 0: any free one")
    served_model_name: tuple[str, ...] = option(
        (),
        Texts(is_list=True),
        group="model",
        help="the model's name for clients; several may be given",
        doc="the model's names for clients, all of which are listed and accepted; an answer has the"
        ' name that its call used. If none is given: the MODEL argument, or "embedded".',
        flag=Flag(metavar="NAME", shown="MODEL"),
    )
    drain_timeout_s: int = option(
        30,
        Whole(1),
        group="server",
        help="time for open answers to finish after SIGTERM",
        flag=Flag(metavar="S"),
    )
    keep_alive_s: float = option(
        KEEP_ALIVE_S,
        Seconds(),
        group="server",
        help="interval of comments in a stream that pauses",
        doc="interval of comments in a stream that pauses, so that proxies keep it open.",
    )
    unknown_fields: str | None = option(
        None,
        OneOf(UNKNOWN_FIELDS),
        group="server",
        help="unknown fields of a body: refuse, or ignore and name them in a header"
        " (X-Ignored-Fields)",
        doc="refuse a body's unknown fields, including those of nested objects, or ignore them;"
        " None: Messages, Responses and Ollama's API ignore them, other APIs refuse them at the top"
        " level, and all APIs ignore labels inside of messages, tools and options.",
        flag=Flag(shown="by API"),
    )
    tool_call_parser: str | None = option(
        None,
        Text(),
        group="chat",
        help="the dialect in which the model calls tools, as hermes, llama3, mistral",
        doc="the dialect in which the model calls tools; None: the dialect of its"
        " response template or chat template.",
        flag=Flag(shown="by the chat template"),
    )
    reasoning_parser: str | None = option(
        None,
        Text(),
        group="chat",
        help="the dialect in which the model thinks before it answers",
        doc="the dialect in which the model thinks before it answers; None: the dialect of its tool"
        " calls.",
        flag=Flag(shown="that of the tool calls"),
    )
    chat_template_file: str | None = option(
        None,
        Text("a file, or a template", is_path=True),
        group="chat",
        help="Jinja file, or a template itself, in place of the model's",
        flag=Flag("chat-template", metavar="FILE", shown="the model's"),
    )
    default_chat_template_kwargs: Mapping[str, Any] | None = option(
        None,
        JsonObject(),
        group="chat",
        help='variables of the chat template, such as {"enable_thinking": false}; a call\'s own'
        " chat_template_kwargs take precedence",
        flag=Flag(shown="none"),
    )
    exclude_tools_when_tool_choice_none: bool = option(
        False,
        Switch(),
        group="chat",
        help="tools are not shown to the model in calls whose tool_choice is none",
    )
    enable_force_include_usage: bool = option(
        False,
        Switch(),
        group="chat",
        help="every stream of a completion or chat ends with its usage, asked for or not",
    )
    return_tokens_as_token_ids: bool = option(
        False,
        Switch(),
        group="chat",
        help="log-probabilities name tokens as token_id:42, unless a call says otherwise",
    )
    lora_modules: tuple[str, ...] = option(
        (),
        Texts("name=folder, or a folder of adapters", is_list=True),
        group="adapters",
        help="adapters by name, as sql=/adapters/sql, or a folder whose folders are adapters;"
        " several may be given",
        doc='adapters that calls may name as their model: "name=folder", the same as JSON with name'
        " and path, or a folder whose folders are adapters, named as these. Those with a name are"
        " read before the server begins to serve, others when a call first names them.",
        flag=Flag(metavar="NAME=FOLDER", shown="none"),
    )
    api_keys: tuple[str, ...] = option(
        (),
        Texts(is_secret=True),
        group="access",
        help="a tenant's key; may be repeated. Visible in the list of processes: better use"
        " --api-key-file, or QUIRE_API_KEYS in the environment",
        doc='"name:key" or "key", each a tenant. Without any, here or in api_key_file, every client'
        " is served, as one tenant.",
        flag=Flag("api-key", metavar="NAME:KEY"),
    )
    api_key_file: str | None = option(
        None,
        Text(),
        group="access",
        help="file with one NAME:KEY per line; read again when it changes",
        flag=Flag(metavar="FILE"),
    )
    allowed_origins: tuple[str, ...] = option(
        (),
        Texts("an origin", reads_json=True),
        group="access",
        help="origin whose web pages may call the server; may be repeated; '*': any",
        flag=Flag(metavar="ORIGIN", shown="none"),
    )
    allowed_hosts: tuple[str, ...] = option(
        (),
        Texts("a name", reads_json=True),
        group="access",
        help="name by which clients may call the server; may be repeated; '*': any. IP addresses"
        " and localhost are always allowed",
        doc="names by which clients may call the server, besides IP addresses and localhost; '*':"
        " any. If none is given: a server without keys on a loopback address refuses all other"
        " names, and any other server accepts all.",
        flag=Flag(metavar="NAME", shown="see docs/security.md"),
    )
    page: bool = option(
        True,
        Switch(),
        group="server",
        help="serve a page for browsers at / (docs/page.md)",
    )
    max_queued_requests: int = option(
        MAX_QUEUED_REQUESTS,
        Whole(1),
        group="limits",
        help="open generations of all tenants; above: 429",
    )
    max_tenant_requests: int | None = option(
        None, Whole(1), group="limits", help="open generations of one tenant", flag=_NO_BOUND
    )
    max_tenant_tokens_per_minute: int | None = option(
        None,
        Whole(1),
        group="limits",
        help="prompt and generated tokens of one tenant, on average",
        flag=_NO_BOUND,
    )
    max_body_bytes: int = option(
        8 << 20,
        Bytes(),
        group="limits",
        help="size of a call's body, such as 4MiB",
        flag=Flag(shown="8MiB"),
    )
    max_total_body_bytes: int | None = option(
        None,
        Bytes(),
        group="limits",
        help="bytes of the bodies of all open calls together, beyond the first 64 KiB of each;"
        " above: 503",
        doc="bytes of the bodies of all open calls together, beyond the first 64 KiB of each; None:"
        " 16 times max_body_bytes.",
        flag=Flag(shown="16 times --max-body-bytes"),
    )
    max_tenant_body_bytes: int | None = option(
        None,
        Bytes(),
        group="limits",
        help="like --max-total-body-bytes, for the calls of one tenant if there are keys; above:"
        " 429",
        doc="like max_total_body_bytes, for the calls of one tenant if there are keys; None: half"
        " of max_total_body_bytes.",
        flag=Flag(shown="half of --max-total-body-bytes"),
    )
    max_connections: int | None = option(
        None,
        Whole(1),
        group="limits",
        help="connections open at once; others wait until one ends",
        doc="connections open at once; others wait until one ends. None: 8192, or as many as the"
        " limit of open files leaves room for.",
        flag=Flag(shown="8192, or what the limit of open files allows"),
    )
    max_connections_per_address: int | None = option(
        None,
        Whole(1),
        group="limits",
        help="connections of one address, unless it is this machine's own",
        doc="connections of one address (of one /64 network of IPv6), unless it is this machine's"
        " own; None: half of max_connections.",
        flag=Flag(shown="half of --max-connections"),
    )
    max_prompts: int = option(256, Whole(1), group="limits", help="prompts of one call")
    max_inputs: int = option(
        2048, Whole(1), group="limits", help="inputs of one call that embeds or scores"
    )
    max_n: int = option(128, Whole(1), group="limits", help="choices (n) per prompt")
    max_choices: int = option(1024, Whole(1), group="limits", help="prompts times n of one call")
    max_stop_strings: int = option(64, Whole(1), group="limits", help="stop strings of one call")
    max_list_length: int = option(
        4096,
        Whole(1),
        group="limits",
        help="entries of stop_token_ids, bad_words, logit_bias and the like",
    )
    response_store_bytes: int | None = option(
        None,
        Bytes(),
        group="limits",
        help="memory for the responses of each tenant that previous_response_id can continue, such"
        " as 256MiB; the least recently used one is dropped first",
        doc="memory for each tenant's responses, which are stored for previous_response_id; None:"
        " no response is stored.",
        flag=Flag(shown="none is stored"),
    )
    batch_dir: str | None = option(
        None,
        Text("a folder", is_path=True),
        group="batches",
        help="folder of clients' files and batches, which are answered in the background"
        " (/v1/files, /v1/batches); made if it does not exist",
        doc="folder of clients' files and batches, which are answered in the background; None: both"
        " are refused.",
        flag=Flag(metavar="DIR", shown="none: both are refused"),
    )
    max_batch_file_bytes: int = option(
        100 << 20,
        Bytes(),
        group="batches",
        help="size of one uploaded file",
        flag=Flag(shown="100MiB"),
    )
    max_tenant_batch_bytes: int = option(
        1 << 30,
        Bytes(),
        group="batches",
        help="size of all files of one tenant; above: uploads and new batches are refused",
        flag=Flag(shown="1GiB"),
    )
    default_deadline_s: float | None = option(
        None,
        Seconds(),
        group="limits",
        help="time limit of calls without a deadline_s",
        flag=_NO_BOUND,
    )
    replicas: int = option(
        1,
        Whole(1),
        group="fleet",
        help="engines of this model, as processes of this machine; each has its own processors or"
        " its own GPU",
        flag=Flag(metavar="N"),
    )
    max_replicas: int | None = option(
        None,
        Whole(1),
        group="fleet",
        help="start engines up to this number while prompts wait, and end those not needed",
        flag=Flag(metavar="N", shown="as many as --replicas"),
    )
    scale_wait_s: float = option(
        1.0,
        Seconds(),
        group="fleet",
        help="how long a prompt may wait for earlier prompts before another engine is started",
    )
    agents: tuple[str, ...] = option(
        (),
        Texts("HOST:PORT of an agent", is_list=True),
        group="fleet",
        help="agents on other machines (`quire cluster agent`), each of which has one replica;"
        " several may be given",
        doc='agents on other machines, each of which has one replica, as "HOST:PORT".',
        flag=Flag(metavar="HOST:PORT", shown="none"),
    )
    ray_address: str | None = option(
        None,
        Text("the address of a Ray cluster"),
        group="fleet",
        help="a Ray cluster, whose nodes have the replicas: auto, or HOST:PORT; needs the package"
        " ray",
        flag=Flag(metavar="ADDRESS", shown="none"),
    )
    replica_cpus: float = option(
        1.0,
        Amount(),
        group="fleet",
        help="CPUs that Ray reserves for a replica",
    )
    replica_gpus: float | None = option(
        None,
        Amount(),
        group="fleet",
        help="GPUs that Ray reserves for a replica",
        flag=Flag(shown="none"),
    )
    cluster_key_file: str | None = option(
        None,
        Text("a file"),
        group="fleet",
        help="file with the key that this server and its agents share",
        doc="file with the key that this server and its agents share; with Ray, a key is made if no"
        " file is given.",
        flag=Flag(metavar="FILE", shown="none"),
    )
    link_heartbeat_s: float = option(
        DEFAULT_HEARTBEAT_S,
        Seconds(),
        group="fleet",
        help="a machine that is silent for this time counts as lost; its streams continue on"
        " others",
    )
    routing_policy: str = option(
        DEFAULT_ROUTING_POLICY,
        OneOf(ROUTING_POLICIES, listed=", ".join),
        group="fleet",
        help="which replica gets a request: {names}",
    )
    idle_unload_s: float | None = option(
        None,
        Seconds(),
        group="server",
        help="release the model's memory after this time without a request; the next request loads"
        " the model again",
        doc="release the model's memory after this time without a request; the next request loads"
        " the model again. None: the model stays.",
        flag=Flag("idle-unload", metavar="S", shown="the model stays"),
    )
    manage_models: bool = option(
        False,
        Switch(),
        group="access",
        help="the operator's calls may fetch models into this machine's cache and delete them there"
        " (Ollama's /api/pull and /api/delete)",
    )
    models_file: str | None = option(
        None,
        Text("a file", is_path=True),
        group="models",
        help="YAML file of models, which are loaded when calls name them; see"
        " docs/several-models.md",
        doc="YAML file of models, which are loaded when calls name them.",
        flag=Flag("models", metavar="FILE", shown="one model"),
    )
    models_memory: int | None = option(
        None,
        Bytes(),
        group="models",
        help="memory for weights and KV caches of all models together, such as 16GiB",
        doc="bytes for weights and KV caches of all models together; None: 80% of the memory that"
        " is available at the start.",
        flag=Flag(shown="four fifths of the memory available at the start"),
    )
    models_wait_s: float = option(
        60.0,
        Seconds(),
        group="models",
        help="how long a call waits for memory that other models use; then: 503",
    )
    models_keep_processes: bool = option(
        False,
        Switch(),
        group="models",
        help="a model that is unloaded keeps a process with the engine's libraries, so that its"
        " next load takes less time",
    )
    heartbeat_timeout_s: float | None = option(
        None,
        Seconds(),
        group="recovery",
        help="restart the engine if a step takes longer (30 s and 20 times its predicted time)",
    )
    max_engine_restarts: int = option(
        5,
        Restarts(),
        group="recovery",
        help="end the server after more crashes than this in five minutes",
    )
    log_level: str = option(
        "info",
        OneOf(LOG_LEVELS, listed=", ".join),
        group="logging",
        help=", ".join(LOG_LEVELS),
        flag=Flag(metavar="LEVEL"),
    )
    log_format: str = option(
        "text",
        OneOf(LOG_FORMATS, listed=", ".join),
        group="logging",
        help="{names}",
        doc='"text", or "json": one object a line.',
    )
    metrics_names: str = option(
        "both",
        OneOf(("both", "quire", "vllm"), listed=", ".join),
        group="logging",
        help="names of the metrics of /metrics: {names}",
        doc='"quire", "vllm": the names that boards and autoscalers for vLLM read, or "both".',
    )
    record: str | None = option(
        None,
        Text("a file", is_path=True),
        group="recording",
        help="record the load into this new file: times, lengths, which prompts share blocks; no"
        " texts (docs/record-replay.md)",
        flag=Flag(metavar="FILE", shown="nothing is recorded"),
    )
    record_block_tokens: int = option(
        64,
        Whole(64, 512),
        group="recording",
        help="size in tokens, from 64 to 512, of the blocks whose equality is recorded; smaller"
        " blocks reveal more about the texts",
    )
    record_time_ms: int = option(
        1,
        Whole(1, 3_600_000),
        group="recording",
        help="times are rounded to multiples of this many milliseconds",
        flag=Flag(metavar="MS"),
    )
    otlp_endpoint: str | None = option(
        None,
        Text(),
        group="logging",
        help="OTLP/HTTP collector for OpenTelemetry spans",
        flag=Flag(metavar="URL", shown="none"),
    )

    @property
    def is_over_machines(self) -> bool:
        """Whether the engines run on other machines, behind agents."""
        return bool(self.agents) or self.ray_address is not None

    @property
    def has_one_engine(self) -> bool:
        """Whether each model always has exactly one engine, on this machine."""
        return self.replicas == (self.max_replicas or 1) == 1 and not self.is_over_machines
