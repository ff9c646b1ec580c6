"""Commands for language models: export, a server of completions."""

import os
import socket
import sys
from pathlib import Path
from typing import Any

import torch

import rl_modules
from recipes import saved_runs
from recipes.model_card import PACKAGES, model_card
from rl_modules.common.errors import UsageError, did_you_mean, naming
from rl_modules.common.foreign_names import default_of
from rl_modules.common.loading import load_object
from rl_modules.common.stored_arguments import building, settings_of
from rl_modules.language.adapter_folder import export_adapters
from rl_modules.language.server_token import (
    FILE_VARIABLE,
    SAYS_VARIABLE,
    TOKEN_VARIABLE,
    default_token_file,
    make_token,
    write_token,
)


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


def export(ckpt_path: str, output: str, model: str | None = None, adapters: bool = False) -> Path:
    """Writes a checkpoint's model as a Hugging Face directory, or its adapters as a folder of peft's, with a card."""
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
    algorithm_class = getattr(rl_modules, algorithm) if model is None else load_object(model, "model")
    from rl_modules.language.base import LanguageModule
    from rl_modules.language.export import export_tokenizer
    from rl_modules.language.policy_with_reference import PolicyWithReference

    module: LanguageModule
    if issubclass(algorithm_class, PolicyWithReference) and algorithm_class.export is LanguageModule.export:
        module = _policy_alone(checkpoint)
    else:
        module = algorithm_class.load_from_checkpoint(ckpt_path, weights_only=True, map_location="cpu")
    hide_transformers_bars()
    if adapters:
        frozen = settings_of(checkpoint)["description"]["frozen"].get("model.", {})
        export_adapters(module.model, frozen.get("path", settings_of(checkpoint)["model_name_or_path"]), folder)
        export_tokenizer(module.tokenizer, folder)
    else:
        module.export(folder)
    (folder / "README.md").write_text(_card(checkpoint, ckpt_path, folder, adapters), "utf-8")
    return folder


def _card(checkpoint: dict[str, Any], ckpt_path: str, folder: Path, adapters: bool) -> str:
    """The model card of an export."""
    algorithm, settings = checkpoint["algorithm"], settings_of(checkpoint)
    own = {name: value for name, value in settings.items() if value is not None and name != "description"}
    data = settings_of(checkpoint, "datamodule_hyper_parameters")
    source = next((str(data[name]) for name in ("task", "path", "dataset") if data.get(name) is not None), "its data")
    auto = "AutoModelForSequenceClassification" if algorithm == "RewardModel" else "AutoModelForCausalLM"
    load = f"from peft import AutoPeft{auto[4:]}" if adapters else f"from transformers import {auto}"
    base = settings.get("model_name_or_path")
    known = checkpoint.get("monitored") or {}
    config = Path(ckpt_path).resolve().parents[1] / "config.yaml"
    return model_card(
        folder.resolve().name,
        f"{'LoRA adapters' if adapters else 'A language model'} trained by {algorithm} on {source}"
        + (f", from {base}." if base else ", from new weights."),
        task_type="text-classification" if algorithm == "RewardModel" else "text-generation",
        dataset=source,
        results={name: f"{float(value):.4g}" for name, value in known.items() if name.startswith("eval/")},
        settings={"model": own, "data": {name: value for name, value in data.items() if value is not None}},
        command=f"rl fit --config {config.name}" if config.is_file() else f"rl fit --model {algorithm} ...",
        usage=f"{load}\n\nmodel = {load.rpartition(' ')[2]}.from_pretrained({folder.name!r})",
        tags=(algorithm.lower(), *(["peft", "lora"] if adapters else [])),
        base_model=base if isinstance(base, str) and not Path(base).exists() else None,
        packages=(*PACKAGES, "transformers", "peft"),
    )


def push_folder(folder: Path, name: str) -> str:
    """Uploads a folder to a repository of the Hugging Face Hub, made where there is none; returns its address."""
    from huggingface_hub import HfApi
    from huggingface_hub.errors import HfHubHTTPError, LocalTokenNotFoundError

    api = HfApi()
    try:
        address = str(api.create_repo(name, exist_ok=True))
        api.upload_folder(repo_id=name, folder_path=folder)
    except (HfHubHTTPError, LocalTokenNotFoundError, OSError) as error:
        reason = " ".join(str(error).split())[:200]
        raise UsageError(
            f"push_to_hub={name!r}: the Hub refuses the upload ({reason}); log in with `hf auth login`, and give "
            "user/name"
        ) from error
    return address


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
    """Becomes vLLM's server of a model, for runs that know its token; see :mod:`rl_modules.language.serving`."""
    from rl_modules.language.sampling.vllm import LOADING, require_vllm

    if given.model is None or given.engine == "native":
        raise UsageError(
            f"--model={given.model} --engine={given.engine}: `rl serve` is vLLM's server of a model, which runs do not "
            "send any more; give --model the run's model.model_name_or_path, or a folder of `rl export`. Without vLLM "
            "take --model.sampler native, which needs no server"
        )
    require_vllm("rl serve")
    if given.vllm and not given.vllm[0].startswith("-"):
        raise UsageError(f"rl serve: unknown option {given.vllm[0]!r}; options of `vllm serve` stand after --")
    with naming(f"--host={given.host} --port={given.port}"), socket.create_server((given.host, given.port)) as free:
        port = free.getsockname()[1]
    token, where = make_token(), f"that of {TOKEN_VARIABLE}"
    path = Path(given.token_file or default_token_file(port)).expanduser().absolute()
    if given.token_file is not None or TOKEN_VARIABLE not in os.environ:
        write_token(path, token)
        where = f"in {path}"
    received = default_token_file(port).with_suffix(".safetensors")
    received.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
    on_cuda = torch.cuda.is_available()
    options = {
        "host": given.host,
        "port": port,
        "dtype": given.dtype or ("bfloat16" if on_cuda else "float32"),
        "gpu-memory-utilization": given.gpu_memory_utilization,
        "max-num-seqs": given.max_rows_in_flight,
        "logprobs-mode": "processed_logprobs",
        "max-logprobs": 1024,
        "generation-config": "vllm",
        "middleware": "rl_modules.language.serving.Gate",
        "worker-extension-cls": LOADING,
        "uvicorn-log-level": "warning",
    }
    words = [f"--{name}={value}" for name, value in options.items() if value is not None]
    words += ["--enable-scale-out", "--return-sampling-mask" if on_cuda else "--enforce-eager", *given.vllm]
    environment = {
        "VLLM_CPU_OMP_THREADS_BIND": "nobind",
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_LOGGING_LEVEL": "WARNING",
        "VLLM_NO_USAGE_STATS": "1",
        **os.environ,
        TOKEN_VARIABLE: token,
        FILE_VARIABLE: str(received),
        SAYS_VARIABLE: f"serving {given.model} on {given.host}:{port}; its token is {where}; stop with Ctrl-C",
    }
    # `vllm serve` ends in its CPU build, whose package has another name than the one that it asks for its version.
    command = [sys.executable, "-m", "vllm.entrypoints.openai.api_server", f"--model={given.model}", *words]
    os.execve(sys.executable, command, environment)
