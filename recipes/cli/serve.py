"""``rl serve``: writes completions for runs with ``--model.sampler vllm_server``."""

import importlib.util
import os
from pathlib import Path
from typing import Any

from recipes.cli.terminal import quiet
from rl_modules.common.errors import UsageError


def serve(given: Any) -> None:
    """Serves runs that know its token until the process is stopped; a run sends its model and weights."""
    if not 0 <= given.port < 65536:
        raise UsageError(f"--port={given.port} must be in 0 to 65535; 0: any free one")
    from rl_modules.language.sampling.engine import NativeEngine
    from rl_modules.language.sampling.server import MakeEngine, Service, make_server
    from rl_modules.language.sampling.vllm import VLLMEngine, unties
    from rl_modules.language.sampling.wire import TOKEN_VARIABLE, default_token_file, make_token, write_token

    quiet()
    cap = given.max_rows_in_flight
    make: MakeEngine
    if given.engine == "native" or given.model is not None:
        make = lambda spec: NativeEngine(spec, cap)  # noqa: E731
    else:
        if importlib.util.find_spec("vllm") is None:
            raise UsageError("--engine=vllm needs vLLM, which is not installed; see docs/language/sampling.md, or take "
                             "--engine=native")  # fmt: skip
        make = lambda spec: VLLMEngine(  # noqa: E731
            spec, gpu_memory_utilization=given.gpu_memory_utilization, max_rows_in_flight=cap
        )
    token = make_token()
    service: Any = Service(make, unties(given.engine))
    if given.model is not None:
        from rl_modules.language.sampling.teacher import TeacherService

        service = TeacherService(given.model)
    server = make_server(service, given.host, given.port, token)
    try:
        where = f"its token is that of {TOKEN_VARIABLE}"
        if given.token_file is not None or TOKEN_VARIABLE not in os.environ:
            path = Path(given.token_file or default_token_file(server.server_port)).expanduser().absolute()
            write_token(path, token)
            where = f"its token is in {path}"
        address = f"{given.host}:{server.server_port}"
        with_what = given.engine if given.model is None else f"the teacher {given.model}"
        print(f"serving on {address} with {with_what}; {where}; stop with Ctrl-C", flush=True)
        server.serve_forever()
    finally:
        server.server_close()
