"""The command `quire`: parses its arguments, runs a command, and prints errors as one sentence.

Only this module reads environment variables. Each command imports the heavy modules that it needs.
Exit codes are 0 for success, 1 for a refusal or failure, 2 for wrong usage, and 130 for Ctrl-C.
"""

import argparse
import os
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from pathlib import Path
from typing import Any

from quire.assembly.address_space import named_memory_failures
from quire.bench.quality.quality_file import DEFAULT_QUALITY_FILE
from quire.child_process import working_folder
from quire.cli.flags import (
    engine_options,
    sampling_options,
    served_engine_options,
    server_options,
)
from quire.cli.parser import DEFAULT_DOCTOR_TOKENS, build_parser
from quire.cli.words import Parser
from quire.errors import ConfigurationError, QuireError
from quire.option_fields import served_defaults
from quire.options.engine_options import EngineOptions
from quire.plugins import load_plugins_of
from quire.quick_start import quick_imports
from quire.server.config import ServerConfig
from quire.server.listed_model import ListedModel
from quire.version import __version__

INTERRUPTED = 130
LOADING_INTERRUPTED = "quire: interrupted while the model was loading"
REPLAY_INTERRUPTED = "quire: the replay was interrupted, so it has no results"
PLAN_INTERRUPTED = "quire: the plan was interrupted"
BENCH_INTERRUPTED = "quire: the benchmark was interrupted, so it has no results"
MAX_BATCH_GENERATIONS = 1 << 20
PASSIVE_WAITING = ("batch", "chat", "cluster", "generate", "plan", "replay", "run", "serve")


def main(words: Sequence[str] | None = None) -> int:
    """Run one command. `words` are its arguments; None means the process's own arguments."""
    # First, parse the arguments, and check the combinations that argparse can't express.
    words = sys.argv[1:] if words is None else words
    try:
        if _command(words) is not None:
            load_plugins_of(words)
        parser = build_parser(_bench_arguments(words), os.environ)
    except QuireError as error:
        if "--debug" in words:
            raise
        print(f"quire: error: {error}", file=sys.stderr)
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    if not words:
        parser.print_help()
        return 0
    args = parser.parse_args(words)
    args.words, args.told = words, parser.chosen(args).told
    _check_texts(parser, args)
    if args.version:
        return _version(args.verbose)
    if args.verbose:
        parser.error("-v goes with --version")
    # Then set the environment of libraries, before they are imported.
    if args.command in PASSIVE_WAITING:
        # Otherwise torch's threads spin between operators. On a machine with other work, spinning
        # took 21 s of CPU time for an answer that needs 3 s, and made steps 40 times as long
        # (measured with two cores, embedded model). Spinning helps only an offline run on an
        # otherwise idle machine.
        os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # Texts are tokenized one at a time, so the tokenizer's thread pool would be useless. The pool
    # also panics if no more threads can be started.
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")
    debug = args.debug or os.environ.get("QUIRE_DEBUG", "0") not in ("", "0")
    # Last, run the command, and turn its errors into a sentence and an exit code.
    try:
        _check_folder()
        if args.print_completion:
            return _print_completion(parser, args.print_completion)
        if args.command not in ("serve", "cluster"):  # these have their own log options
            _configure_log("warning")
        with named_memory_failures():
            return _COMMANDS[args.command](args)
    except QuireError as error:
        if debug:
            raise
        _complain(args.told(str(error)))
        return 1
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has closed it (`quire ... | head`), which is no error. Python
        # flushes stdout at exit and would report the closed pipe again, so stdout is redirected.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1
    except OSError as error:  # a full disk, a file that can't be written
        if debug:
            raise
        _complain(str(error))
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 1


def _check_texts(parser: Parser, args: argparse.Namespace) -> None:
    """Exit if a command lacks what it reads, or has a model's path in place of a text."""
    if args.command == "generate" and not (args.prompts or args.prompt):
        parser.error("the following arguments are required: PROMPT")
    if args.command == "generate" and args.model is None and _is_model(*args.prompts[:1]):
        parser.error(
            f"{args.prompts[0]} is a model; write --model {args.prompts[0]} before a PROMPT"
        )
    if args.command == "batch" and args.input is None:
        parser.error("the following arguments are required: FILE")
    if args.command == "plan" and args.load is None:
        parser.error("the following arguments are required: --load")


def _is_model(text: str = "") -> bool:
    """Whether a text is the path of a model's folder or of a GGUF file."""
    is_folder = os.path.isfile(os.path.join(text, "config.json"))
    return text != "" and (is_folder or (text.endswith(".gguf") and os.path.isfile(text)))


def _complain(message: str) -> None:
    """Print an error's sentence to stderr, or log it if the log is in JSON."""
    from quire.observability import log  # `--version` and `--help` need no logging

    if log.is_json():
        log.get_logger("quire").error("%s", message)
    else:
        print(f"quire: error: {message}", file=sys.stderr)


def _version(is_verbose: bool) -> int:
    print(f"quire {__version__}")
    if is_verbose:
        from quire.kernels.cpu.selection import describe_kernels  # brings torch

        print(describe_kernels())
    return 0


def _print_completion(parser: Parser, shell: str) -> int:
    import shtab  # only here

    print(shtab.complete(parser, shell))
    return 0


def _configure_log(usual: str) -> None:
    from quire.observability.log import configure  # `--version` and `--help` need no logging

    configure(os.environ.get("QUIRE_LOG_LEVEL") or usual)


def _bench_arguments(words: Sequence[str]) -> dict[str, Any] | None:
    """Maps each benchmark to the function that adds its arguments; None if `bench` is not the
    command."""
    is_completion = any(word.startswith("--print-completion") for word in words)
    if _command(words) != "bench" and not is_completion:
        return None
    _check_folder()
    with named_memory_failures(), _named_interrupt(BENCH_INTERRUPTED):
        return {name: benchmark.add_arguments for name, benchmark in _benchmarks().items()}


def _command(words: Sequence[str]) -> str | None:
    """The command's name; None if `quire` itself is asked, as for its version."""
    return next((word for word in words if not word.startswith("-")), None)


def _check_folder() -> None:
    """Raise ConfigurationError if the working folder was deleted."""
    if working_folder() is not None:
        raise ConfigurationError(
            "the folder in which quire was started has been deleted, and torch can't be loaded"
            " there; go to another one"
        )


def _benchmarks() -> dict[str, Any]:
    """Maps each benchmark to its module, which has `add_arguments` and `main`."""
    from quire.bench import throughput  # only one command needs them
    from quire.bench.quality import perplexity
    from quire.replay import bench_serve

    return {
        "serve": bench_serve,
        "throughput": throughput,
        "perplexity": perplexity,
    }


def _sampling(args: argparse.Namespace) -> Any:
    """Make the SamplingParams, which is done before a model is loaded."""
    from quire.core.sampling_params import SamplingParams  # light; needed by two commands

    return SamplingParams(**sampling_options(args))


def _load(given: Mapping[str, Any]) -> Any:
    """Make the LLM with these engine options."""
    _check_early(given)
    with quick_imports():
        from quire.offline.llm import LLM  # brings torch: more than a second

    return LLM(**given)


def _check_early(given: Mapping[str, Any]) -> None:
    """Refuse options and local models that the engine would refuse after it has imported torch."""
    from quire.engine_client.early_checks import (  # only commands that load a model need it
        check_before_start,
        check_device,
        check_memory,
    )
    from quire.hub.found_model import FoundModel  # the same
    from quire.hub.model_folder import local_model  # the same

    options = EngineOptions.from_mapping(given)
    check_device(options.device)
    check_memory(options)
    found = local_model(options.model, options.revision)
    if found is not None:
        check_before_start(options, FoundModel(found))


@contextmanager
def _spinning(text: str) -> Iterator[None]:
    """Show on the terminal what the block does."""
    from quire.cli.chat.terminal import Spinner  # other commands don't need it

    spinner = Spinner(sys.stderr, text)
    try:
        yield
    finally:
        spinner.stop()


@contextmanager
def _named_interrupt(text: str) -> Iterator[None]:
    """Print `text` if Ctrl-C interrupts the block. Used for blocks that print nothing
    themselves."""
    try:
        yield
    except KeyboardInterrupt:
        print(f"\n{text}", file=sys.stderr)
        raise


def _generate(args: argparse.Namespace) -> int:
    texts = [*args.prompts, *(args.prompt or ())]
    prompts = [sys.stdin.read() if prompt == "-" else prompt for prompt in texts]
    params = _sampling(args)
    with _named_interrupt(LOADING_INTERRUPTED), _spinning("loading the model"):
        llm = _load(engine_options(args))
    for index, prompt in enumerate(prompts):
        if len(prompts) > 1:
            print(f"{chr(10) if index else ''}==> {prompt} <==")
        for piece in llm.stream(prompt, params):
            print(piece, end="", flush=True)
        print(flush=True)
    return 0


def _chat(args: argparse.Namespace) -> int:
    from quire.cli.chat.answers import (  # only these commands need them
        Answers,
        EngineAnswers,
        ServerAnswers,
    )
    from quire.cli.chat.session import ChatSession, load_readline  # only these commands need it

    params = _sampling(args)
    answers: Answers
    if args.url is not None:
        answers = ServerAnswers(args.url, args.model, args.api_key)
    else:
        with _named_interrupt(LOADING_INTERRUPTED), _spinning("loading the model"):
            answers = EngineAnswers(partial(_loaded, args), partial(_fetch, args))
    is_plain = args.plain or bool(os.environ.get("NO_COLOR"))
    session = ChatSession(
        answers, args.system, params, shows_stats=args.stats, is_plain=is_plain, told=args.told
    )
    if args.prompt is not None:
        session.ask(args.prompt)
        return 0
    load_readline()
    if sys.stdin.isatty():
        print(f"{answers.name} is ready; /help lists the commands")
    session.run()
    return 0


def _loaded(args: argparse.Namespace, name: str | None) -> Any:
    """Load the model of the chat, or the one called `name` with the same options."""
    from quire.cli.chat.answers import LoadedModel  # only a chat needs it
    from quire.hub.model_folder import resolve_text_folder  # the same

    given = _of_model(args, name)
    options = EngineOptions.from_mapping(given)
    llm = _load(given)
    source = options.tokenizer or options.model
    folder = resolve_text_folder(source, None if options.tokenizer else options.revision)
    return LoadedModel(options.model or "the embedded model", llm, folder)


def _fetch(args: argparse.Namespace, name: str) -> None:
    """Fetch a model for the chat if it is not here, and check what `_check_early` checks."""
    from quire.hub.model_folder import resolve_model_folder  # only a chat needs it

    resolve_model_folder(name, needs_tokenizer=True)
    _check_early(_of_model(args, name))


def _of_model(args: argparse.Namespace, name: str | None) -> dict[str, Any]:
    """The given engine options. If `name` is another model, the options about the given model's
    files are left out."""
    given = engine_options(args)
    return given if name is None else dict(given, model=name, revision=None, tokenizer=None)


def _serve(args: argparse.Namespace) -> int:
    given = server_options(args)
    if level := os.environ.get("QUIRE_LOG_LEVEL"):
        given.setdefault("log_level", level.lower())
    given["api_keys"] = (*_environment_keys(), *given.get("api_keys", ()))
    server = ServerConfig(**given)
    from quire.observability.log import configure  # after the server's options were checked

    configure(server.log_level, server.log_format)
    models = None if server.models_file is None else _models(server.models_file, args)
    with _named_interrupt(LOADING_INTERRUPTED), ExitStack() as undo:
        early = None
        if models is None and server.has_one_engine:
            from quire.engine_client.process.early_process import EarlyProcess  # a server needs it
            from quire.server.http.open_files import raise_open_files  # the same

            # The engine's process imports its libraries while this process imports the server. It
            # inherits the limit of open files.
            raise_open_files()
            early = EarlyProcess()
            undo.callback(early.close)
        with _spinning("starting the server"), quick_imports():
            from quire.server.launch import serve  # brings the web framework

        return serve(served_engine_options(args), server, models, early)


def _models(path: str, args: argparse.Namespace) -> list[ListedModel]:
    from quire.cli.models_file import read_models  # only a server of several models reads it

    return read_models(path, args)


def _cluster(args: argparse.Namespace) -> int:
    if args.action == "serve":
        return _serve(args)
    from quire.cluster.machines.agent_main import run  # brings asyncio

    _configure_log("info")
    return run(args)


def _batch(args: argparse.Namespace) -> int:
    from quire.server.batch.run import BatchJob, run_batch  # brings the web framework

    # A batch serves no other client, so only the number of open calls is limited.
    server = ServerConfig(**server_options(args), max_queued_requests=MAX_BATCH_GENERATIONS)
    options = {**served_defaults(EngineOptions), **engine_options(args)}
    calls = Path(args.input)
    output = args.output or calls.with_name(f"{calls.stem}_output.jsonl")
    job = BatchJob(calls, Path(output), args.max_open_calls)
    try:
        return run_batch(options, server, job)
    except KeyboardInterrupt:
        print(f"\nquire: interrupted; the answers so far are in {output}", file=sys.stderr)
        return INTERRUPTED


def _environment_keys() -> list[str]:
    """Read the API keys in QUIRE_API_KEYS.

    Raises ConfigurationError if the variable is set but has no key, because a missing secret must
    not open the server to everyone.
    """
    text = os.environ.get("QUIRE_API_KEYS")
    keys = (text or "").replace(",", " ").split()
    if text is not None and not keys:
        raise ConfigurationError(
            "QUIRE_API_KEYS is set, but has no key in it; give one as NAME:KEY, or unset it"
        )
    return keys


def _pull(args: argparse.Namespace) -> int:
    from quire.cli.models import pull  # brings the hub's client

    return pull(args.model, args.revision, _examine)


def _show(args: argparse.Namespace) -> int:
    return _examine(args.model, args.revision)


def _examine(name: str, revision: str | None) -> int:
    from quire.cli.doctor.model import examine_model  # only these commands look at a model

    file = Path(DEFAULT_QUALITY_FILE)
    return examine_model(name, revision, DEFAULT_DOCTOR_TOKENS, measure=True, quality_file=file)


def _list(args: argparse.Namespace) -> int:
    from quire.cli.models import list_models  # brings the hub's client

    return list_models()


def _rm(args: argparse.Namespace) -> int:
    from quire.cli.models import remove  # brings the hub's client

    return remove(args.model)


def _ps(args: argparse.Namespace) -> int:
    from quire.cli.models import list_running  # only this command asks a server

    return list_running(args.url, args.api_key)


def _top(args: argparse.Namespace) -> int:
    from quire.cli.top.loop import show  # brings rich

    return show(args.url, args.api_key, args.model, args.interval, is_once=args.once)


def _doctor(args: argparse.Namespace) -> int:
    if args.model is not None:
        from quire.cli.doctor.model import examine_model  # only this command looks at a model

        return examine_model(
            args.model,
            args.revision,
            args.tokens,
            measure=args.measure,
            quality_file=Path(args.quality_file),
        )
    from quire.cli.doctor.findings import examine  # only this command looks at the machine

    return examine(args.port, measure=args.measure)


def _replay(args: argparse.Namespace) -> int:
    with _named_interrupt(REPLAY_INTERRUPTED):
        from quire.cli.replay import replay  # only this command reads traces

        return replay(args, engine_options(args))


def _plan(args: argparse.Namespace) -> int:
    with _named_interrupt(PLAN_INTERRUPTED):
        from quire.cli.plan import make_plan  # only this command plans, which brings torch

        return make_plan(args, engine_options(args))


def _bench(args: argparse.Namespace) -> int:
    with _named_interrupt(BENCH_INTERRUPTED):
        return int(_benchmarks()[args.benchmark].main(args))


def _cache(args: argparse.Namespace) -> int:
    from quire.cli.cache import main as act  # only this command reads a cache folder

    return act(args.action, Path(args.folder), as_json=args.json)


_COMMANDS: dict[str, Callable[[argparse.Namespace], int]] = {
    "generate": _generate,
    "chat": _chat,
    "run": _chat,
    "pull": _pull,
    "list": _list,
    "rm": _rm,
    "show": _show,
    "ps": _ps,
    "top": _top,
    "serve": _serve,
    "batch": _batch,
    "replay": _replay,
    "plan": _plan,
    "bench": _bench,
    "doctor": _doctor,
    "cluster": _cluster,
    "cache": _cache,
}
