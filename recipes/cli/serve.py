"""``rl serve``: writes completions for runs with ``--model.sampler vllm_server``."""

import os
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from recipes.cli.terminal import quiet
from rl_modules.common.errors import UsageError, did_you_mean

USAGE = (
    "serve takes --engine vllm|native, --host, --port, --token_file, --gpu_memory_utilization and --max_rows_in_flight"
)


def serve(args: Sequence[str]) -> None:
    """Serves requests until the process is stopped.

    The run sends the model's description and weights, so the server needs no path. It answers only runs that know its
    token, which is written to a file that only this user can read.
    """
    options = parse(args)
    from rl_modules.language.sampling.engine import NativeEngine
    from rl_modules.language.sampling.server import MakeEngine, Service, make_server
    from rl_modules.language.sampling.vllm import VLLMEngine, unties
    from rl_modules.language.sampling.wire import TOKEN_VARIABLE, default_token_file, make_token, write_token

    quiet()
    cap = options["max_rows_in_flight"]
    make: MakeEngine
    if options["engine"] == "native":
        make = lambda spec: NativeEngine(spec, cap)  # noqa: E731
    else:
        require_vllm()
        make = lambda spec: VLLMEngine(  # noqa: E731
            spec, gpu_memory_utilization=options["gpu_memory_utilization"], max_rows_in_flight=cap
        )
    token = make_token()
    server = make_server(Service(make, unties(options["engine"])), options["host"], options["port"], token)
    try:
        where = f"its token is that of {TOKEN_VARIABLE}"
        if options["token_file"] is not None or TOKEN_VARIABLE not in os.environ:
            path = Path(options["token_file"] or default_token_file(server.server_port)).expanduser().absolute()
            write_token(path, token)
            where = f"its token is in {path}"
        address = f"{options['host']}:{server.server_port}"
        print(f"serving on {address} with {options['engine']}; {where}; stop with Ctrl-C", flush=True)
        server.serve_forever()
    finally:
        server.server_close()


def parse(args: Sequence[str]) -> dict[str, Any]:
    """Returns the options of ``rl serve``."""
    kinds: dict[str, Callable[[str], Any]] = {
        "engine": str, "host": str, "port": int, "token_file": str, "gpu_memory_utilization": float,
        "max_rows_in_flight": int,
    }  # fmt: skip
    options: dict[str, Any] = {"engine": "vllm", "host": "127.0.0.1", "port": 8000, "token_file": None,
                               "gpu_memory_utilization": 0.9, "max_rows_in_flight": None}  # fmt: skip
    pending = iter(args)
    for arg in pending:
        name, equals, value = arg.removeprefix("--").partition("=")
        if not arg.startswith("--") or name not in kinds:
            raise UsageError(f"{USAGE}; got {arg!r}{did_you_mean(name, kinds)}")
        value = value if equals else next(pending, "")
        try:
            options[name] = kinds[name](value)
        except ValueError as error:
            raise UsageError(f"--{name}={value!r} must be a number") from error
    if options["engine"] not in ("vllm", "native"):
        raise UsageError(f"--engine={options['engine']!r} must be vllm or native")
    if not 0 <= options["port"] < 65536:
        raise UsageError(f"--port={options['port']} must be in 0 to 65535; 0: any free one")
    return options


def require_vllm() -> None:
    """Refuses to start without vLLM."""
    import importlib.util

    if importlib.util.find_spec("vllm") is None:
        raise UsageError("--engine=vllm needs vLLM, which is not installed; see docs/language/sampling.md, or take "
                         "--engine=native")  # fmt: skip
