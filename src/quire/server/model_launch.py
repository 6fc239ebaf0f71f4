"""Checks one model's options, reads its files, starts its engines, and makes its `Service`.

`launch` calls it for the model of a server, `model_loader` for each of several, and `batch.run` for
the model of a batch file. Imports no torch.
"""

import contextlib
import sys
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any

from quire.core.sampling_params import ModelLimits
from quire.engine_client.early_checks import check_before_start, check_device, check_memory
from quire.engine_client.fleet import EngineFleet
from quire.engine_client.image_prompts import make_reader
from quire.engine_client.process.early_process import EarlyProcess
from quire.engine_client.process.grammar_compilers import GrammarCompilers
from quire.errors import ConfigurationError
from quire.hub.found_model import FoundModel
from quire.hub.model_folder import EMBEDDED_MODEL_NAME, find_model, resolve_text_folder
from quire.images.reader import MAX_HELD_BYTES, ImageReader
from quire.observability import log
from quire.options.engine_options import EngineOptions
from quire.server.adapter_names import AdapterNames, LoRAModules, read_modules
from quire.server.app import all_endpoints
from quire.server.config import ServerConfig
from quire.server.fleet_launch import check_fleet, start_engines
from quire.server.generation.answer_defaults import AnswerDefaults
from quire.server.generation.grammar_checks import GrammarChecks
from quire.server.generation.seeds import Seeds
from quire.server.idle_unload import idle_unload
from quire.server.loading_progress import LoadingProgress
from quire.server.service import Service, SharedState
from quire.server.start_message import SINGLE_API_SERVER, dialect_line, ledger
from quire.text.chat_template import ChatTemplate
from quire.text.parsers.model_dialect import ModelDialect, model_dialect
from quire.text.tokenizer import Tokenizer
from quire.text.tokenizer_config import tokenizer_fields
from quire.version import __version__

logger = log.get_logger(__name__)


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """The options and files of one model, checked before it is loaded."""

    #: Options of the engine. Their `model` is the folder in which the model was found, or names the
    #: embedded model.
    options: EngineOptions
    server: ServerConfig
    model_names: tuple[str, ...]
    #: Seed from which the seeds of requests without one are derived; None means random seeds.
    server_seed: int | None
    files: "ModelFiles"
    lora_modules: LoRAModules
    #: The engine's first process; None if it has not started.
    early: EarlyProcess | None = None

    @property
    def files_in_use(self) -> list[str]:
        """The models whose files the server needs, by name or path."""
        options = self.options
        found = (options.model, options.tokenizer, options.speculative_model)
        return [str(self.files.model.folder), *(name for name in found if name is not None)]


@dataclass(frozen=True, slots=True)
class ModelFiles:
    """Contents of a model's folder that the API server needs."""

    model: FoundModel
    tokenizer: Tokenizer
    #: Grammar compilers for the tokenizer's vocabulary, used until the engine reports the model's
    #: vocabulary size. The function that starts the engine closes them.
    grammars: GrammarCompilers
    chat_template: ChatTemplate
    dialect: ModelDialect
    tokenizer_fields: Mapping[str, Any]
    #: Reads the images of prompts; None for models that take text only.
    images: ImageReader | None = None


def make_plan(
    engine_options: Mapping[str, object], server: ServerConfig, early: EarlyProcess | None = None
) -> ModelPlan:
    """Check the options of a model and read the files that the API server needs. `engine_options`
    has the fields of `EngineOptions` by name; `early` is as in `ModelPlan`. Raises
    ConfigurationError and its subclasses."""
    options = EngineOptions.from_mapping(engine_options)
    if options.skip_tokenizer_init:
        raise ConfigurationError(
            "skip_tokenizer_init is set, but the server needs the tokenizer to take and give text"
        )
    check_fleet(server)
    if not server.is_over_machines:
        check_device(options.device)
        check_memory(options)
    all_endpoints()  # imports them, which takes long, before the engine starts
    files = _load_files(options, server)
    name = files.model.name_for_clients(options.model or EMBEDDED_MODEL_NAME)
    names = server.served_model_name or (name,)
    if server.lora_modules and not options.enable_lora:
        raise ConfigurationError(
            "lora_modules names adapters, but they are not served; set enable_lora, or leave it out"
        )
    if options.model is not None and not server.is_over_machines:
        # Name the model so that the engine need not find or fetch it a second time.
        model, revision = files.model.named_for_others(options.model)
        options = replace(options, model=model, revision=revision)
    return ModelPlan(
        options,
        server,
        names,
        options.seed if "seed" in engine_options else None,
        files,
        read_modules(server.lora_modules, names),
        early,
    )


def _load_files(options: EngineOptions, server: ServerConfig) -> ModelFiles:
    own = options.tokenizer is None
    model = find_model(
        options.model,
        options.revision,
        needs_tokenizer=own,
        takes_images=options.fetches_encoder,
    )
    check_before_start(options, model)
    text_folder = model.folder if own else resolve_text_folder(options.tokenizer)
    tokenizer = Tokenizer.from_folder(text_folder, remembers_words=False)
    if server.chat_template_file is None:
        template = ChatTemplate.from_folder(text_folder)
    else:
        template = ChatTemplate.from_option(server.chat_template_file, text_folder)
    fields = tokenizer_fields(text_folder)
    dialect = model_dialect(
        template, tokenizer, fields, server.tool_call_parser, server.reasoning_parser
    )
    grammars = GrammarCompilers(text_folder, tokenizer.vocab_size, dialect.dialect)
    images = make_reader(model.folder, options, tokenizer, max_held_bytes=MAX_HELD_BYTES)
    return ModelFiles(model, tokenizer, grammars, template, dialect, fields, images)


async def start_engine(plan: ModelPlan, *, shows_progress: bool = True) -> EngineFleet:
    """Start the engine and show the progress of loading the model on stderr. Raises
    EngineDeadError, or the error that kept the engine from being built."""
    options = plan.options.as_mapping()
    if not shows_progress:
        return await start_engines(options, plan.server, lambda *_: None, plan.early)
    log_line = logger.info if log.is_json() else None
    with contextlib.closing(LoadingProgress(sys.stderr, log_line=log_line)) as progress:
        return await start_engines(options, plan.server, progress, plan.early)


def begin_grammars(files: ModelFiles, limits: ModelLimits) -> None:
    """Start the process that compiles grammars, for the vocabulary that the engine reports. It
    starts after the engine, with which it would compete for processors. If the model generates no
    text, close the compilers instead."""
    if limits.generates:
        files.grammars.limit_to(limits.vocab_size)
        files.grammars.begin()
    else:
        files.grammars.close()


def make_service(plan: ModelPlan, engine: EngineFleet, shared: SharedState) -> Service:
    """Make the `Service` of a model whose engine has started, after `begin_grammars`."""
    return Service(
        engine,
        plan.files.tokenizer,
        plan.files.chat_template,
        plan.model_names[0],
        Seeds(plan.server_seed),
        allow_special_tokens=plan.options.allow_special_tokens,
        tokenizer_fields=plan.files.tokenizer_fields,
        system_fingerprint=_fingerprint(engine.facts),
        idle_unload=idle_unload(engine, plan.server.idle_unload_s),
        grammars=GrammarChecks(plan.files.grammars),
        dialect=plan.files.dialect.dialect,
        default_chat_template_kwargs=plan.server.default_chat_template_kwargs or {},
        other_names=plan.model_names[1:],
        images=plan.files.images,
        adapters=AdapterNames(
            engine if plan.options.enable_lora else None, plan.lora_modules.paths, plan.model_names
        ),
        answer_defaults=AnswerDefaults(
            includes_usage=plan.server.enable_force_include_usage,
            names_token_ids=plan.server.return_tokens_as_token_ids,
            hides_unused_tools=plan.server.exclude_tools_when_tool_choice_none,
        ),
        **shared.as_mapping(),
    )


def start_lines(plan: ModelPlan, engine: EngineFleet) -> list[str]:
    """The lines that the server prints about its only model when it begins to serve."""
    lines = [ledger(plan.model_names[0], engine.facts)]
    if len(engine.engines_by_name) > 1:
        lines.append(SINGLE_API_SERVER)
    if plan.files.chat_template.exists:
        found = plan.files.dialect
        lines.append(dialect_line(found.dialect.name, found.source, found.refusal))
    return lines


def _fingerprint(facts: Mapping[str, Any]) -> str:
    """OpenAI's `system_fingerprint`: names the settings of the server and engine that influence the
    answers."""
    known = (facts.get(key) for key in ("kernels", "dtype", "quantization"))
    return "-".join(["quire", __version__, *(str(fact) for fact in known if fact is not None)])
