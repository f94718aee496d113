"""Runs `laurel serve`: serves a reward model over HTTP until it is stopped."""

from __future__ import annotations

import gc
import importlib.util
import os
import resource
import secrets
import stat
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from laurel import plugins
from laurel.config.policy import TokenizerConfig
from laurel.errors import (
    ConfigError,
    MissingDependencyError,
    ModelError,
    Names,
    WorkerError,
    speaking,
)
from laurel.extensions.server.keys import is_loopback, private_network
from laurel.extensions.server.options import ServeOptions
from laurel.extensions.server.service import (
    AccessLog,
    Opening,
    RewardService,
    ServedModel,
    ServingSpec,
    open_served,
)
from laurel.models.spec import ModelSpec
from laurel.observe.console import verbosity, wrapped
from laurel.observe.json_output import write_json
from laurel.rewards.batching import BatcherLimits
from laurel.rewards.spec import ScorerSpec, ScoringEngine, find_reward_model
from laurel.run.specs import OPTIONS

if TYPE_CHECKING:
    from laurel.extensions.server.app import App
    from laurel.extensions.server.run import ServerRun

DEFAULT_KEY_ENV = "LAUREL_API_KEY"
DEFAULT_ADMIN_KEY_ENV = "LAUREL_ADMIN_KEY"
# 32 random characters cannot be guessed, however many tries there are.
_SHORTEST_KEY = 32
_MOST_REPLICAS = 256
# A replica that takes longer for one batch hangs.
_REPLICA_SECONDS = 30.0
_NEEDED = ("fastapi", "uvicorn", "prometheus_client")


@dataclass(frozen=True, slots=True, kw_only=True)
class Key:
    """An API or admin key of the server, and the source it was read from."""

    value: str | None
    source: str
    header: str = ""
    """The shell expression that yields the key, for the example command with curl."""
    location: dict[str, str] | None = None
    """The source for programs that read the key: `{"variable": NAME}` or `{"file": PATH}`."""


def run_serve(options: ServeOptions, *, opens: Opening | None = None) -> None:
    """Serve a reward model until SIGTERM or SIGINT; what needs no model is checked first.

    `opens` opens what is served, as `service.open_model` does; None: the model of the options.

    Raises:
        WorkerError: Every replica has used up its restarts; exit code 75 asks for a restart.
    """
    _check(options)
    if opens is None and not options.model:
        raise ConfigError(
            "give a reward model: --model with a directory or a name on the Hugging Face hub"
        )
    # For all replicas, and all that are started again.
    options = replace(options, date=options.date or datetime.now())
    from laurel.extensions.server.run import ServerRun, listen
    from laurel.workers.threads import in_thread

    key, admin_key = _keys(options)
    spec = _serving_spec(options, opens)
    access_log = _open_log(options.access_log)
    listener = listen(options.host, options.port)
    port = listener.getsockname()[1]
    key = key or _key_of_file(port)  # whose name holds the port
    # Each connection takes a file, and the shell's limit is often 1,024.
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    with suppress(OSError, ValueError):
        resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 65536)), hard))

    async def open_model(model: str = "") -> ServedModel:
        if not model:
            return await _open(options, spec)
        # In a thread, as other requests wait in the event loop.
        changed = replace(options, model=model)
        loaded = await in_thread(lambda: _serving_spec(changed, names=_NAMELESS), name="finding")
        return await _open(options, loaded)

    async def load(model: str) -> ServedModel:
        if not Path(model).is_dir():
            raise ModelError(
                f"{model!r} is no directory of this machine. Give the path of a model, a "
                "checkpoint or a run, as the server's machine sees it"
            )
        served = await open_model(model)
        say(f"serving {model} from now on, version {served.version}")
        return served

    service = RewardService(
        open_model=None if opens else load, request_seconds=options.request_seconds
    )
    app = _app(service, options, key, admin_key, access_log)
    url = f"http://{_in_url(options.host)}:{port}"
    _chat(f"loading {options.model or 'what is served'}, to serve it on {url}")

    def report_ready(served: ServedModel) -> None:
        _print_address(served, url, key, admin_key, options.allow_from or ())
        if options.as_json:
            ready = {
                "url": url,
                "model": served.name,
                "version": served.version,
                "key": key.location,
                "allow_from": options.allow_from or [],
            }
            write_json(ready, indent=None)

    run = ServerRun(app, service, listener, drain_seconds=options.drain_seconds)
    try:
        run.run(open_model, on_ready=report_ready)
    finally:
        if access_log is not None:
            access_log.close()
    _tell_end(run, options.drain_seconds)
    # The process ends now, and a last garbage collection of all objects would take a second.
    gc.freeze()


def _tell_end(run: ServerRun, drain_seconds: float) -> None:
    if run.lost_all:
        raise WorkerError(
            "every replica of the model crashed too often and is not restarted; waiting requests "
            "were refused. The warnings above say how the replicas crashed",
            exit_code=WorkerError.LOST_EXIT_CODE,
        )
    silent = f"; {run.silent} connections had sent nothing and were closed" if run.silent else ""
    if run.unanswered:
        say(
            f"stopped; after {drain_seconds:g} s {run.unanswered} requests were left "
            f"without an answer{silent}"
        )
    else:
        _chat(f"stopped; every accepted request was answered{silent}")


def _chat(text: str) -> None:
    if verbosity() != "quiet":
        say(text)


def say(text: str, *, is_command: bool = False) -> None:
    """Write text to standard error; a full or closed stream is ignored.

    On a terminal, lines are wrapped between words. A command (`is_command`) is not wrapped, so that
    it can be pasted.
    """
    with suppress(OSError):
        if os.isatty(2) and not is_command:
            text = wrapped(text, os.get_terminal_size(2).columns or 80)
        os.write(2, (text + "\n").encode())


def _check(options: ServeOptions) -> None:
    for package in _NEEDED:
        if importlib.util.find_spec(package) is None:
            raise MissingDependencyError.of(package, extra="serve", purpose="laurel serve")
    if not 1 <= options.replicas <= _MOST_REPLICAS:
        raise ConfigError(f"--replicas {options.replicas}: from 1 to {_MOST_REPLICAS}")
    if not 0 <= options.port < 2**16:
        raise ConfigError(f"--port {options.port}: from 0 to 65535")
    if options.no_api_key and not _is_loopback(options.host):
        raise ConfigError(
            f"--no-api-key is for loopback addresses only, and --host {options.host} is reached "
            "from other machines; leave one of them out"
        )
    if options.allow_from and options.no_api_key:
        raise ConfigError(
            "--allow-from names addresses that need no key, and with --no-api-key none does; leave "
            "one of them out"
        )
    for text in options.allow_from or ():
        try:
            network = private_network(text)
        except ValueError as error:
            raise ConfigError(f"--allow-from {text}: {error}") from error
        if _is_loopback(options.host) and not network.is_loopback:
            raise ConfigError(
                f"--allow-from {text}: no machine there reaches --host {options.host}; set --host "
                "to the server's address in that network, or to 0.0.0.0"
            )


def _is_loopback(host: str) -> bool:
    return host == "localhost" or is_loopback(host)


def _in_url(host: str) -> str:
    return f"[{host}]" if ":" in host else host


def _keys(options: ServeOptions) -> tuple[Key | None, Key]:
    """Return the API key, None if it is that of a file, and the admin key."""
    key = (
        Key(value=None, source="none is needed")
        if options.no_api_key
        else _key_of_environment(DEFAULT_KEY_ENV, options.api_key_env, option="--api-key-env")
    )
    # An admin key without a value stands for the API key.
    admin_key = _key_of_environment(
        DEFAULT_ADMIN_KEY_ENV, options.admin_key_env, option="--admin-key-env"
    ) or Key(value=None, source="")
    if key is not None and key.value is not None and key.value == admin_key.value:
        raise ConfigError(
            f"the admin key is the API key: set {admin_key.header[1:]} to another one, or unset it"
        )
    return key, admin_key


def _open_log(target: str) -> AccessLog | None:
    try:
        return None if target == "none" else AccessLog(target, say=say)
    except OSError as error:
        raise ConfigError(
            f"--access-log {target}: {error.strerror}. Name a file that can be written, - for "
            "stderr, or none"
        ) from error


def _key_of_environment(default: str, variable: str | None, *, option: str) -> Key | None:
    name = variable or default
    value = os.environ.pop(name, "")  # child processes do not inherit the key
    if not value:
        if variable is not None:
            raise ConfigError(f"{option} {name}: there is no such variable, or it is empty")
        return None
    if len(value) < _SHORTEST_KEY or not value.isascii() or any(not "!" <= c <= "~" for c in value):
        raise ConfigError(
            f"the key in {name} has to have at least {_SHORTEST_KEY} printable ASCII characters, "
            "without blanks. `openssl rand -hex 32` makes one"
        )
    return Key(
        value=value,
        source=f"the one in the variable {name}",
        header=f"${name}",
        location={"variable": name},
    )


def _key_of_file(port: int) -> Key:
    """Read the key from a file that only its owner can read; generate it if there is none."""
    state = os.environ.get("XDG_STATE_HOME") or str(Path.home() / ".local" / "state")
    directory = Path(state) / "laurel"
    path = directory / f"serve-{port}.key"
    try:
        directory.mkdir(mode=0o700, parents=True, exist_ok=True)
        value = _kept_key(path)
        if value is None:
            value = secrets.token_urlsafe(32)
            path.unlink(missing_ok=True)
            flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC
            with os.fdopen(os.open(path, flags, 0o600), "w") as file:
                file.write(value)
    except OSError as error:
        raise ConfigError(
            f"the API key cannot be kept in {path} ({error.strerror}); set the variable "
            f"{DEFAULT_KEY_ENV} to one"
        ) from error
    return Key(
        value=value, source=f"in {path}", header=f"$(cat {path})", location={"file": str(path)}
    )


def _kept_key(path: Path) -> str | None:
    """Read a previously generated key, unless another user may have read or written it."""
    try:
        descriptor = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CLOEXEC)
    except OSError:
        return None
    with os.fdopen(descriptor) as file:
        about = os.fstat(descriptor)
        is_ours = about.st_uid == os.getuid() and stat.S_IMODE(about.st_mode) == 0o600
        value = file.read(256) if is_ours and stat.S_ISREG(about.st_mode) else ""
    return value if len(value) >= 32 and value.isascii() and value.isprintable() else None


def _app(
    service: RewardService,
    options: ServeOptions,
    key: Key,
    admin_key: Key,
    log: AccessLog | None,
) -> App:
    from laurel.extensions.server.app import GateOptions, make_app

    hosts = {"localhost", "127.0.0.1", "[::1]", _in_url(options.host).lower()}
    gate = GateOptions(
        api_key=key.value,
        admin_key=admin_key.value,
        allow_from=tuple(map(private_network, options.allow_from or ())),
        hosts=tuple(hosts) if _is_loopback(options.host) else None,
        log_texts=options.log_texts,
    )
    return make_app(service, gate, access_log=log)


_NAMES = (OPTIONS, {"policy.tokenizer.date": "--date"})
# A model that a request names has no option.
_NAMELESS = (*_NAMES, {"policy.model_name": ""})


def _serving_spec(
    options: ServeOptions, opens: Opening | None = None, *, names: Sequence[Names] = _NAMES
) -> ServingSpec:
    """Return the spec of the model to serve, which is resolved here and loaded later."""
    limits = BatcherLimits(batch_tokens=options.batch_tokens, max_waiting=options.max_waiting)
    spec = ServingSpec(limits=limits, cpu_threads=options.cpu_threads)
    if opens is not None:
        return replace(spec, opens=opens)
    engine = None
    if options.engine != "laurel":
        plugin = plugins.find(plugins.Engine, options.engine)
        if not isinstance(plugin, plugins.EngineThatScores):
            raise ConfigError(f"--engine {options.engine}: it samples, and computes no scores")
        plugin.check_installed(f"--engine {options.engine}")
        section = plugin.scoring_section and plugin.scoring_section()
        engine = ScoringEngine(plugin=plugin, section=section)
    day = None if options.date is None else options.date.date()
    with speaking(*names):
        place = find_reward_model(options.model)
    scorer = ScorerSpec(
        model=ModelSpec(name=options.model, tokenizer=TokenizerConfig(date=day)),
        found=place,
        max_length=options.max_length,
        batch_tokens=options.batch_tokens,
        precision=options.precision,
        device=options.device,
        engine=engine,
        aggregate=options.aggregate,
        names=tuple(names),
    )
    return replace(spec, scorer=scorer)


async def _open(options: ServeOptions, spec: ServingSpec) -> ServedModel:
    from laurel.workers.threads import in_thread

    if options.replicas == 1:
        return await in_thread(lambda: open_served(spec, say=say), name="loading")
    from laurel.extensions.server.replicas import open_replicas

    limit = min(_REPLICA_SECONDS, options.request_seconds)
    return await in_thread(
        lambda: open_replicas(spec, options.replicas, limit=limit, say=say), name="loading"
    )


def _print_address(
    served: ServedModel, url: str, key: Key, admin_key: Key, allow_from: Sequence[str]
) -> None:
    header = f' \\\n        -H "Authorization: Bearer {key.header}"' if key.value else ""
    of_admin = f"\nadmin   {admin_key.source}" if admin_key.value else ""
    body = '{"groups": [{"id": "1", "prompt": "2 + 2?", "completions": ["4", "5"]}]}'
    without_key = (
        f"open    {', '.join(allow_from)}: programs on these addresses get scores without a key.\n"
        "        Other addresses need it, and so do admin requests, web pages, and requests that\n"
        "        a proxy marks as forwarded. A proxy there that adds no X-Forwarded-For opens\n"
        "        this server to everyone who reaches the proxy.\n"
        if allow_from
        else ""
    )
    say(
        f"ready   {url}\n"
        f"model   {served.name}\n"
        f"version {served.version}\n"
        f"key     {key.source}{of_admin}\n"
        f"{without_key}".rstrip("\n")
    )
    say(
        f"try     curl {url}/v1/score{header} \\\n"
        f"        -H 'Content-Type: application/json' \\\n        -d '{body}'",
        is_command=True,
    )
