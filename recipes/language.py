"""Commands for language models: export, a server of completions."""

import os
import sys
from pathlib import Path
from typing import Any

import rl_modules
from recipes import saved_runs
from recipes.terminal import quiet
from rl_modules.common.errors import UsageError, did_you_mean
from rl_modules.common.foreign_names import default_of
from rl_modules.common.stored_arguments import building, settings_of


def hide_transformers_bars() -> None:
    """Hides transformers' own progress bars for model files, if transformers is imported."""
    library: Any = sys.modules.get("transformers")
    if library is not None:
        library.utils.logging.disable_progress_bar()


def require_room(model: Any, data: Any, fits: bool) -> None:
    """Refuses a completion length that leaves no room for a prompt, before a run begins."""
    longest, wanted = model.max_length, model.hparams.get("max_completion_length")
    if wanted is None or wanted < longest:
        return
    kind = getattr(data, "kind", None)
    # Preferences are only scored, and with demonstrations completions are written only in evaluations.
    writes = kind != "preferences" and (kind != "demonstrations" or not fits or data.can_evaluate)
    if writes or wanted != default_of(type(model), "max_completion_length"):
        raise UsageError(
            f"max_completion_length={wanted} leaves no room for a prompt: the model takes {longest} "
            "tokens, prompt and completion together; lower it"
        )


def export(ckpt_path: str, output: str, model: str | None = None) -> Path:
    """Writes a checkpoint's model as a Hugging Face directory."""
    folder = Path(output)
    if folder.exists() and (not folder.is_dir() or any(folder.iterdir())):
        raise UsageError(f"output={output!r} exists already; give a new folder, or an empty one")
    checkpoint = saved_runs.read(Path(ckpt_path))
    algorithm = checkpoint.get("algorithm")
    if algorithm is None or "observation_space" in settings_of(checkpoint):
        raise UsageError(
            f"{ckpt_path} holds {algorithm or 'no algorithm'}, which is no language model; only those are "
            "exported as Hugging Face directories"
        )
    if model is None and algorithm not in rl_modules.__all__:
        raise UsageError(
            f"{ckpt_path} holds {algorithm}, which is none of rl_modules; give its class with --model "
            f"package.module.{algorithm}{did_you_mean(algorithm, rl_modules.__all__)}"
        )
    from rl_modules.common.loading import load_object

    algorithm_class = getattr(rl_modules, algorithm) if model is None else load_object(model, "model")
    from rl_modules.language.base import LanguageModule
    from rl_modules.language.policy_with_reference import PolicyWithReference

    module: LanguageModule
    if issubclass(algorithm_class, PolicyWithReference) and algorithm_class.export is LanguageModule.export:
        module = _policy_alone(checkpoint)
    else:
        module = algorithm_class.load_from_checkpoint(ckpt_path, weights_only=True, map_location="cpu")
    hide_transformers_bars()
    return module.export(folder)


def _policy_alone(checkpoint: dict[str, Any]) -> Any:
    """Loads only the policy of a checkpoint, because its reward model and reference may have been moved."""
    from rl_modules.language.base import LanguageModule

    settings = settings_of(checkpoint)
    description = settings["description"]
    frozen = {prefix: source for prefix, source in description["frozen"].items() if prefix == "model."}
    names = ("model_name_or_path", "lora", "torch_dtype")
    with building(LanguageModule, ()):
        module = LanguageModule(
            **{name: settings[name] for name in names}, description={**description, "frozen": frozen}
        )
    module.configure_model()
    module.load_weights({name: value for name, value in checkpoint["state_dict"].items() if name.startswith("model.")})
    return module


def serve(given: Any) -> None:
    """Serves runs that know its token until the process is stopped; a run sends its model and weights."""
    from rl_modules.language.sampling.engine import NativeEngine
    from rl_modules.language.sampling.server import MakeEngine, Service, make_server
    from rl_modules.language.sampling.vllm import VLLMEngine, require_vllm, unties
    from rl_modules.language.sampling.wire import TOKEN_VARIABLE, default_token_file, make_token, write_token

    quiet()
    hide_transformers_bars()  # one for each of a run's updates
    cap = given.max_rows_in_flight
    make: MakeEngine
    if given.engine == "native" or given.model is not None:
        make = lambda spec: NativeEngine(spec, cap)  # noqa: E731
    else:
        require_vllm("--engine=vllm")
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
        with_what = given.engine if given.model is None else f"the teacher {given.model}"
        print(f"serving on {given.host}:{server.server_port} with {with_what}; {where}; stop with Ctrl-C", flush=True)
        server.serve_forever()
    finally:
        server.server_close()
