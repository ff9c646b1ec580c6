"""What this project registers, and what in an argument is other code, which a checkpoint must not bring.

Each function takes an argument's value and yields the names of code in it that only the user may give. None imports it.
"""

from collections.abc import Iterator, Mapping
from typing import Any

from gymnasium import wrappers as gymnasiums

from rl_modules.common.loading import name_of
from rl_modules.common.named_code import is_path, named_code, named_modules, parts_of

#: Before the name of one of reasoning-gym's datasets.
REASONING_GYM = "reasoning_gym:"
_LANGUAGE = "datamodules.language"
#: The project's own objects for an argument that takes an import path, by module.
OBJECTS: dict[str, tuple[str, ...]] = {
    f"{_LANGUAGE}.rewards": (
        "exact_answer",
        "answer_in_tags",
        "last_number",
        "think_answer_format",
        "math_accuracy",
        "length_reward",
        "soft_overlong_penalty",
        "repetition_penalty",
        "cosine_length",
        "outside_thought",
        "reward_model",
    ),
    f"{_LANGUAGE}.tasks.simple": ("Addition", "Reverse", "Sort"),
    f"{_LANGUAGE}.tasks.countdown": ("Countdown",),
    f"{_LANGUAGE}.tasks.paths": ("Paths",),
    f"{_LANGUAGE}.tasks.pictures": ("Dots",),
    f"{_LANGUAGE}.curriculum": ("learnable",),
    f"{_LANGUAGE}.worlds": ("TextMaze", "Guess", "Nim", "Arithmetic", "Islands"),
    f"{_LANGUAGE}.tools": ("ToolEnvironment",),
    f"{_LANGUAGE}.adapters.gymnasium": ("GymnasiumEnvironment",),
    f"{_LANGUAGE}.adapters.nemo_gym": ("NeMoGymEnvironment",),
    f"{_LANGUAGE}.adapters.openenv": ("OpenEnvEnvironment",),
    f"{_LANGUAGE}.calculator": ("calculator",),
    f"{_LANGUAGE}.search": ("search",),
}


def is_registered(path: str) -> bool:
    """Whether an import path names one of :data:`OBJECTS`."""
    module, _, name = path.replace(":", ".").rpartition(".")
    return name in OBJECTS.get(module, ())


def code_of_settings(value: Any) -> Iterator[str]:
    """Of settings that are passed on, such as ``env_kwargs``."""
    return (path for path in named_code(value) if not is_registered(path))


def code_of_names(value: Any) -> Iterator[str]:
    """Of a name or import path, or of several with settings: reward functions, a curriculum, an environment."""
    for part in parts_of(value):
        if callable(part):
            yield name_of(part)
    entries = value if isinstance(value, list | tuple | set) else [value]
    for entry in entries:
        names = list(entry) if isinstance(entry, Mapping) else [entry]
        yield from (name for name in names if isinstance(name, str) and is_path(name) and not is_registered(name))
        if isinstance(entry, Mapping | list | tuple | set):
            yield from code_of_settings(entry)


def code_of_environment(env_id: Any) -> Iterator[str]:
    """Of an environment: all but ids that are registered with Gymnasium."""
    if not isinstance(env_id, str):
        yield name_of(env_id)
    elif ":" in env_id:
        yield env_id


def code_of_wrappers(wrappers: Any) -> Iterator[str]:
    """Of wrappers: all that are not in ``gymnasium.wrappers``, and modules among their settings."""
    for wrapper in wrappers if isinstance(wrappers, list | tuple) else [] if wrappers is None else [wrappers]:
        path = wrapper.get("class_path") if isinstance(wrapper, Mapping) else wrapper
        if not isinstance(path, str):
            yield name_of(path) if callable(path) else str(path)
        elif path.removeprefix("gymnasium.wrappers.") not in gymnasiums.__all__:
            yield path
        if isinstance(wrapper, Mapping):
            yield from named_modules({key: part for key, part in wrapper.items() if key != "class_path"})


def code_of_task(task: Any) -> Iterator[str]:
    """Of a task, or of a list of sources with tasks, their settings and reward functions."""
    if isinstance(task, str):
        if is_path(task) and not (task.startswith(REASONING_GYM) or is_registered(task)):
            yield task
    elif isinstance(task, list | tuple):
        for source in task:
            if not isinstance(source, Mapping):
                yield from code_of_task(source)
                continue
            yield from code_of_task(source.get("task"))
            if all(source.get(key) is None for key in ("task", "path", "dataset")):
                yield from code_of_task(source.get("name"))
            yield from code_of_settings(source.get("task_kwargs"))
            yield from code_of_names(source.get("reward_funcs"))
    elif task is not None:
        yield name_of(task)
